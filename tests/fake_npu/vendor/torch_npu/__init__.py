"""Stands for torch_npu: importing it makes torch.npu, whose one device is the host."""

import os
import sys
from types import ModuleType, SimpleNamespace

import torch

from fake_npu import operators
from spmd_rl.patches import cpu_torch

_OPERATORS = [name for name in vars(operators) if name.startswith("npu_")]
__all__ = ("calls", "npu", *_OPERATORS)

DIES, GIB = 8, 1 << 30
calls: dict[str, int] = dict.fromkeys(_OPERATORS, 0)
_die: list[int] = []
"""The current one, once it was touched."""


def _counted(operator):
    def call(*args, **options):
        calls[operator.__name__] += 1
        return operator(*args, **options)

    return call


globals().update({name: _counted(getattr(operators, name)) for name in _OPERATORS})


def _capability(*device):
    """None without the variable that the program sets."""
    said = os.environ.get("TORCH_NPU_DEVICE_CAPABILITY")
    return tuple(map(int, said.split("."))) if said else None


def _allocator(setting: str) -> None:
    name, _, on = setting.partition(":")
    assert name == "expandable_segments"
    npu.expandable_segments = on == "True"


def _properties(*die):
    """Say what a torch without CUDA says: its compiler, with which vLLM's kernels of a host are made, knows no NPU."""
    raise AssertionError("Torch not compiled with CUDA enabled")


class _Generators(tuple):
    """One for each die: of the host, which the current device is, the same."""

    def __getitem__(self, die):
        return torch.default_generator


def _made() -> ModuleType:
    """Return torch.npu: what streams, events and memory are on a host, and what only the vendor's module has."""
    made = cpu_torch._cuda()
    made.is_available = lambda: True
    made.is_initialized = lambda: bool(_die)
    made.set_device = lambda die: _die.__setitem__(slice(None), [die])
    made.device_count = lambda: DIES
    made.get_device_capability, made.get_device_properties = _capability, _properties
    made.default_generators = _Generators((torch.default_generator,) * DIES)
    made.manual_seed = made.manual_seed_all = lambda seed: torch.default_generator.manual_seed(seed)
    made.mem_get_info = lambda: (48 * GIB, 64 * GIB)
    made.memory = SimpleNamespace(_set_allocator_settings=_allocator)
    made.config = SimpleNamespace(allow_internal_format=True)
    made.expandable_segments = False
    return made


npu = _made()
torch.npu = npu
sys.modules["torch.npu"] = npu
