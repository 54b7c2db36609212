"""Try functions of tensors on a few tokens before a run starts: what one that can't be used does wrong."""

import inspect
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

LENGTHS = [2, 3]
"""Response tokens of the samples that functions are tried on."""
PARTS = ("pg_loss", "kl_loss", "clipped", "ppo_kl")
"""Of a policy's loss, for the log."""


def loss_fault(loss: Callable[..., object], reference: bool) -> str:
    """Return what is wrong with a policy's loss; nothing where it can be used. `reference`: there is a reference."""
    logprobs = _tokens(0.1).requires_grad_()
    given = [logprobs, _tokens(), _tokens().add(1.0), _tokens(-0.1) if reference else None, _tokens().neg()]
    more = {"lengths": LENGTHS} if "lengths" in inspect.signature(loss).parameters else {}
    return _call(lambda: loss(*given, **more), lambda found: _loss(found, logprobs) or _parts(found[1]))


def value_loss_fault(loss: Callable[..., object]) -> str:
    """Return what is wrong with a critic's loss; nothing where it can be used."""
    values = _tokens(0.1).requires_grad_()
    given = [values, _tokens(), _tokens().neg()]
    return _call(lambda: loss(*given), lambda found: _loss(found, values) or _column("where it was clipped", found[1]))


def correction_fault(correction: Callable[..., object]) -> str:
    """Return what is wrong with a correction; nothing where it can be used."""

    def look(found: tuple[object, object]) -> str:
        return _column("the weights", found[0]) or _column("where they were bounded", found[1])

    return _call(lambda: correction(_tokens(), _tokens(0.1), LENGTHS), look)


def _tokens(shift: float = 0.0) -> Tensor:
    return torch.tensor([-0.5, -1.0, -0.25, -2.0, -1.5]) + shift


def _call(function: Callable[[], object], look: Callable[[tuple[object, object]], str]) -> str:
    try:
        found = function()
        if not isinstance(found, tuple) or len(found) != 2:
            return f"it returned {type(found).__name__}; two values are needed"
        return look(found)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _loss(found: tuple[object, object], learns: Tensor) -> str:
    """Look at the loss, and at the gradient that it gives `learns`."""
    if fault := _column("the loss", found[0]):
        return fault
    loss = found[0]
    assert isinstance(loss, Tensor)
    if not loss.requires_grad:
        return "the loss has no gradient; compute it from the first argument, without detach()"
    loss.sum().backward()
    return _column("the gradient", learns.grad)


def _parts(parts: object) -> str:
    if not isinstance(parts, Mapping):
        return f"beside the loss it returned {type(parts).__name__}; a dictionary of {', '.join(PARTS)} is needed"
    if missing := [name for name in PARTS if name not in parts]:
        return f"the parts of its loss lack {', '.join(missing)}"
    return next(filter(None, (_column(f"the part {name}", parts[name]) for name in PARTS)), "")


def _column(name: str, numbers: object) -> str:
    """Return what is wrong with numbers of which each token should have one."""
    if not isinstance(numbers, Tensor):
        return f"{name}: it returned {type(numbers).__name__}; a tensor is needed"
    if numbers.shape != (sum(LENGTHS),):
        return f"{name}: it returned a tensor {list(numbers.shape)}; one number for each token is needed"
    broken = int((~torch.isfinite(numbers)).sum())
    return f"{name}: {broken} of its numbers are not finite" if broken else ""
