"""A sample as the ranks hold it, named tensors, and how it travels from rank to rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import torch

_LENGTH_BYTES = 8


@dataclass
class Sample:
    """L tokens: P of a prompt and R of the response to it; the policy is trained on N of the R."""

    id: int
    tokens: torch.Tensor
    """Token ids [L], int32 or int64."""
    prompt_tokens: int
    loss_mask: torch.Tensor
    """[R] bool: False where the policy did not write the token (what a tool answered, say)."""
    fields: dict[str, torch.Tensor] = field(default_factory=dict)
    """By response token [R]: rollout_logprobs, policy_logprobs, reference_logprobs, advantages, weights, values; and
    tensors of any shape that belong to the sample (an image's pixels)."""

    @classmethod
    def of(cls, id: int, prompt: torch.Tensor, response: torch.Tensor, **fields: torch.Tensor) -> Sample:
        """Make a sample whose response the policy wrote, all of it."""
        mask = torch.ones(len(response), dtype=torch.bool)
        return cls(id, torch.cat((prompt, response)), len(prompt), mask, fields)

    @property
    def prompt(self) -> torch.Tensor:
        return self.tokens[: self.prompt_tokens]

    @property
    def response(self) -> torch.Tensor:
        return self.tokens[self.prompt_tokens :]

    @property
    def loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def _loss_places(self) -> torch.Tensor:
        """Return the places of the loss tokens in the response [N]: the mask is on the host, so nobody waits."""
        return self.loss_mask.nonzero()[:, 0]

    def at_loss_tokens(self, name: str) -> torch.Tensor:
        """Return a field by response token at the loss tokens [N], on the device that it is on."""
        field = self.fields[name]
        return field.index_select(0, self._loss_places.to(field.device))

    def put(self, name: str, values: torch.Tensor | float) -> None:
        """Set a field by response token: `values` of the loss tokens [N], or one number for each; 0 at the others."""
        like = values if isinstance(values, torch.Tensor) else torch.zeros(0)
        whole = like.new_zeros(len(self.loss_mask))
        whole[self._loss_places.to(whole.device)] = values
        self.fields[name] = whole


def to_wire(samples: Iterable[Sample]) -> torch.Tensor:
    """Lay samples down as bytes [uint8]: the header's length, the header, and each tensor's own bytes.

    The header (msgpack) says what the fields are called and made of, once, and of each sample its id, its prompt's
    tokens and the shapes of its tensors. Nothing takes no bytes.
    """
    columns: dict[tuple[str, str], int] = {}
    rows, parts = [], []
    for sample in samples:
        shapes = []
        for name, tensor in (("tokens", sample.tokens), ("loss_mask", sample.loss_mask), *sample.fields.items()):
            column = columns.setdefault((name, str(tensor.dtype).removeprefix("torch.")), len(columns))
            shapes.append((column, tuple(tensor.shape)))
            parts.append(tensor.detach().cpu().reshape(-1).view(torch.uint8))
        rows.append((sample.id, sample.prompt_tokens, shapes))
    if not rows:
        return torch.empty(0, dtype=torch.uint8)
    header = msgspec.msgpack.encode((list(columns), rows))
    lead = len(header).to_bytes(_LENGTH_BYTES, "little") + header
    return torch.cat([torch.frombuffer(bytearray(lead), dtype=torch.uint8), *parts])


def from_wire(wire: torch.Tensor) -> Iterator[Sample]:
    """Take up the samples of one sender; their tensors share no memory with the wire."""
    if not len(wire):
        return
    at = _LENGTH_BYTES + int.from_bytes(wire[:_LENGTH_BYTES].numpy().tobytes(), "little")
    columns, rows = msgspec.msgpack.decode(wire[_LENGTH_BYTES:at].numpy().tobytes())
    dtypes = [getattr(torch, dtype) for _, dtype in columns]
    for id, prompt_tokens, shapes in rows:
        tensors = []
        for column, shape in shapes:
            end = at + math.prod(shape) * dtypes[column].itemsize
            tensors.append((columns[column][0], wire[at:end].clone().view(dtypes[column]).view(shape)))
            at = end
        (_, tokens), (_, loss_mask), *fields = tensors
        yield Sample(id, tokens, prompt_tokens, loss_mask, dict(fields))
    assert at == len(wire), f"{len(wire) - at} bytes belong to no sample"
