"""All that we rely on in the wheels for NPUs holds in them, and the checker finds what does not."""

import ast
import warnings
import zipfile

import pytest

from spmd_rl.doctor.profiles import PROFILES
from tools.npu_contract.__main__ import examine, wheels_of
from tools.npu_contract.rows import Row, check
from tools.npu_contract.scan import _uses
from tools.npu_contract.schema import Schema
from tools.npu_contract.wheel import NoWheel, Wheel

OPERATOR = "npu_norm(Tensor self, Tensor gamma, float epsilon=1e-06, *, int[]? ends=None) -> (Tensor, Tensor)"
SOURCES = {
    "torch_npu/__init__.py": "from torch_npu.npu import *\n",
    "torch_npu/npu/__init__.py": "__all__ = ['set_device', 'memory']\ndef set_device(device): ...\n",
    "torch_npu/npu/memory.py": "if True:\n    def _set(settings): ...\n",
    "torch_npu-1.dist-info/METADATA": "Requires-Dist: torch ==2.0\n",
    "torch_npu/lib/libtorch_npu.so": f"\0{OPERATOR}\0HCCL_BUFFSIZE\0",
}


@pytest.mark.long
@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_every_row_and_every_use_of_ours_holds_in_the_published_wheels(profile, arch):
    try:
        wheels = wheels_of(profile, arch)
    except NoWheel as error:
        warnings.warn(f"NOT CHECKED against {profile} {arch}: {error}", stacklevel=1)
        pytest.skip(f"NOT CHECKED against {profile} {arch}: {error}")
    wrong, rows, uses = examine(profile, wheels)
    assert wrong == [] and rows > 60 and uses > 80


@pytest.fixture
def wheels(tmp_path):
    path = tmp_path / "torch_npu-1-cp311-cp311-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as file:
        for name, text in SOURCES.items():
            file.writestr(name, text)
    found = Wheel("torch_npu", path)
    return {"torch_npu": found, "vllm_ascend": found, "megatron_core": found}


def problems(wheels, source):
    return [f"{what}: {problem}" for _, what, problem in _uses(ast.parse(source), wheels) if problem]


def test_what_a_wheel_does_not_have_is_found_in_our_source(wheels):
    fine = "import torch_npu\ntorch_npu.npu_norm(x, w, epsilon=1)\ntorch.npu.set_device(0)\nx = 'HCCL_BUFFSIZE'\n"
    assert problems(wheels, fine + "torch.npu.memory._set('a')\n'torch:npu.set_device'") == []
    assert problems(wheels, "torch_npu.npu_norm(x, w, eps=1)") == ["npu_norm: no parameter eps"]
    assert problems(wheels, "torch_npu.npu_norm(x)") == ["npu_norm: missing gamma"]
    assert problems(wheels, "torch_npu.npu_nrom(x)") == ["npu_nrom: no such operator"]
    assert problems(wheels, "torch.npu.set_devise(0)") == ["torch.npu.set_devise: not in torch.npu"]
    assert problems(wheels, "torch.npu.memory._sat('a')") == ["torch.npu.memory._sat: not in torch.npu"]
    assert problems(wheels, "'torch:npu.sync'") == ["torch:npu.sync: not in torch.npu"]
    assert problems(wheels, "x = 'HCCL_BUFSIZE'") == ["HCCL_BUFSIZE: no wheel reads it"]
    [found] = problems(wheels, "from torch_npu.contrib import transfer_to_npu")
    assert found.startswith("torch_npu.contrib.transfer_to_npu: not in")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (Row("says", "torch_npu", "torch_npu/npu/memory.py", "def _set", ""), ""),
        (Row("says", "torch_npu", "torch_npu/npu/memory.py", "def _get", ""), "it is not there"),
        (Row("not", "torch_npu", "torch_npu/npu/memory.py", "def _set", ""), "it is there now"),
        (Row("defines", "torch_npu", "torch_npu/npu/memory.py", "_set(settings)", ""), ""),
        (Row("defines", "torch_npu", "torch_npu/npu/memory.py", "_set(options)", ""), "it lacks options"),
        (Row("defines", "torch_npu", "torch_npu/npu/memory.py", "_get()", ""), "it is not defined"),
        (Row("runtime", "torch_npu", "torch.npu", "synchronize", ""), "not in torch.npu"),
        (Row("call", "torch_npu", "npu_norm", "2 epsilon ends", ""), ""),
        (Row("no call", "torch_npu", "npu_norm", "", ""), "there is such an operator now"),
        (Row("library", "torch_npu", "", "HCCL_NONE", ""), "the library does not have it"),
        (Row("requires", "torch_npu", "", "torch==2.0", ""), ""),
        (Row("says", "vllm", "any", "any", ""), ""),
    ],
)
def test_a_row_turns_red_when_upstream_moves(wheels, row, why):
    assert check(row, wheels) == why


def test_schemas_are_read_with_their_defaults_and_keywords():
    schema = Schema.parse(OPERATOR)
    assert schema is not None and schema.base == "npu_norm"
    assert schema.misfit(4, set()) == "4 positional arguments, it takes 3"
    assert schema.misfit(2, {"self"}) == "given twice: self"
    assert schema.misfit(2, {"ends"}) == ""
