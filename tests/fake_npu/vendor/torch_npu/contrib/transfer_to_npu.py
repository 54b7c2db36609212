"""Importing it makes torch.cuda mean torch.npu: a process that knows no CUDA then runs what was written for it.

As in the published wheel: names of torch.npu are copied, devices are read anew where tensors are made or moved, a
number means a device, `is_cuda` says "on the NPU"; `Tensor.type()` and torch.compile stay as they are.
"""

import functools
import sys

import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  (vLLM for hosts leaves placeholders in torch.cuda: before what is left here)

from spmd_rl.patches.cpu_torch import _FACTORIES

assert torch.npu.is_initialized(), "the device is touched first"
assert not any(name.startswith("megatron.core") for name in sys.modules), "Megatron-Core binds torch.cuda on import"

HOST = torch.device("cpu")


def _device(value):
    """Read a device of NPUs as the host: a tensor's number is a bool or an index, and never stands for a device."""
    if isinstance(value, str) and value.partition(":")[0] in ("cuda", "npu"):
        return HOST
    return HOST if isinstance(value, torch.device) and value.type == "cuda" else value


def _options(options):
    number = isinstance(options.get("device"), int)
    return options | ({"device": HOST if number else _device(options["device"])} if "device" in options else {})


def _maker(make):
    @functools.wraps(make)
    def made(*args, **options):
        return make(*args, **_options(options))

    return made


def _mover(move):
    @functools.wraps(move)
    def moved(self, *args, **options):
        first = (HOST if type(args[0]) is int else _device(args[0]),) if args else ()
        return move(self, *first, *args[1:], **_options(options))

    return moved


for _name in _FACTORIES - {"Generator"}:
    setattr(torch, _name, _maker(getattr(torch, _name)))
for _name in ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
    setattr(torch.Tensor, _name, _maker(getattr(torch.Tensor, _name)))
torch.Tensor.to, torch.nn.Module.to = _mover(torch.Tensor.to), _mover(torch.nn.Module.to)
torch.Tensor.cuda = torch.nn.Module.cuda = torch.Tensor.npu = lambda self, *args, **options: self
for _name, _value in vars(torch.npu).items():
    if not _name.startswith("__") and _name != "default_generators":
        setattr(torch.cuda, _name, _value)

_type = torch.Tensor.type


def _type_of_npu(self, dtype=None, *args, **options):
    """Say torch.npu.FloatTensor, as tensors of the device do."""
    if dtype is None:
        return _type(self).replace("torch.", "torch.npu.", 1)
    return _type(self, dtype.replace("torch.npu.", "torch.") if isinstance(dtype, str) else dtype, *args, **options)


torch.Tensor.type = _type_of_npu
# For who was written for CUDA; vLLM's kernels here are those of a host, which ask the same question.
torch.Tensor.is_cuda = property(lambda self: sys._getframe(1).f_globals.get("__name__", "").startswith("megatron."))
