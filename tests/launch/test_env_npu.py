"""The variables of CANN: each of its two parts is sourced where it is missing, whatever its scripts do."""

import subprocess

import pytest

from spmd_rl.testing.launcher import ROOT

SCRIPT = 'source launch/env.npu.sh; echo "$ASCEND_HOME_PATH $ATB_HOME_PATH $-"; shopt -o pipefail | cut -f2'


SET = {"ASCEND_HOME_PATH": "/mine"}


@pytest.mark.parametrize("there", [{}, SET, SET | {"ATB_HOME_PATH": "/its"}])
def test_toolkit_and_operators_are_sourced_apart_and_outside_the_callers_options(tmp_path, there):
    for part, name in (("ascend-toolkit", "ASCEND_HOME_PATH"), ("nnal/atb", "ATB_HOME_PATH")):
        script = tmp_path / part / "set_env.sh"
        script.parent.mkdir(parents=True)
        # They read what is not set, and call what fails.
        script.write_text(f"echo $NEVER_SET | false\nfalse\nexport {name}={part}\n")
    environment = {"PATH": "/usr/bin:/bin", "SPMD_RL_ASCEND": str(tmp_path), "SPMD_RL_PRELOAD": ""} | there
    command = ["bash", "-euo", "pipefail", "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    (toolkit, operators, options), pipefail = (line.split() for line in done.stdout.splitlines())
    assert toolkit == there.get("ASCEND_HOME_PATH", "ascend-toolkit")
    assert operators == there.get("ATB_HOME_PATH", "nnal/atb")
    assert "e" in options and "u" in options and pipefail == ["on"]


@pytest.mark.parametrize("place", ["usr/lib64", "usr/local/lib", "usr/local/lib64"])
def test_jemalloc_is_found_where_packages_and_a_build_of_its_sources_put_it(tmp_path, place):
    library = tmp_path / place / "libjemalloc.so.2"
    library.parent.mkdir(parents=True)
    library.touch()
    environment = {"PATH": "/usr/bin:/bin", "SPMD_RL_ASCEND": str(tmp_path), "SPMD_RL_ROOT": str(tmp_path)}
    command = ["bash", "-euo", "pipefail", "-c", "source launch/env.npu.sh; printenv LD_PRELOAD || true"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert f"{library}" in done.stdout + done.stderr  # the loader says that the empty file is no library
