"""Count what makes a program wait for its device, on a CPU too, where nothing waits: by what is asked of tensors."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operators whose result, or its size, is known on the host only when the device has got there.
_WAITS = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
    "is_nonzero",
    "bincount",
}
_METHODS = ("tolist", "cpu", "numpy")


class DeviceReads(TorchDispatchMode):
    """Count the waits inside of it, by name; what numpy computes is on the host already."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Number of all waits."""
        return self.counts.total()

    def __torch_dispatch__(
        self,
        operator: torch._ops.OpOverload,
        types: object,
        arguments: tuple = (),
        options: dict[str, object] | None = None,
    ) -> object:
        name = operator.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in arguments[1]
        )
        repeats = name == "repeat_interleave" and not (options or {}).get("output_size")
        if name in _WAITS or masks or repeats:
            self.counts[f"{name} of a mask" if masks else name] += 1
        return operator(*arguments, **(options or {}))

    def __enter__(self) -> "DeviceReads":
        self._methods = ExitStack()
        for name in _METHODS:
            self._methods.enter_context(patch.object(torch.Tensor, name, self._counted(name)))
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        self._methods.close()
        super().__exit__(*raised)

    def _counted(self, name: str) -> Callable[..., object]:
        """A method that no operator stands for on a CPU."""
        original = getattr(torch.Tensor, name)

        def method(tensor: torch.Tensor, *arguments: object, **options: object) -> object:
            self.counts[name] += 1
            return original(tensor, *arguments, **options)

        return method
