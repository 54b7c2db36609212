"""Samples laid one after another without padding, the common prompt of a group only once.

A group of samples that share their prompt is laid down as `prompt, response 1, response 2, ...`: the hidden states of a
prompt do not depend on what follows, so computing them once gives the same losses and gradients as computing them for
every sample. The last token of a response predicts nothing and is left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from spmd_rl.distributed.sample import Sample
from spmd_rl.platforms import current
from spmd_rl.platforms.attention_layout import Attend, AttentionLayout, QuerySequence
from spmd_rl.training.expert_replay import choices_of
from spmd_rl.training.vision import ImageLayout, Images, Pixels, pixels_of


@dataclass
class PackedTokens(PackedSeqParams):
    """Megatron's packed sequence parameters, with what shared prompts need beside them."""

    attend: Attend | None = None
    """The platform's attention over all T tokens."""
    positions: torch.Tensor | None = None
    """Position of each token of this rank's chunk in its own sequence [C]; where samples of the micro-batch have
    positions of their own, along time, height and width [3, C]."""
    images: Images | None = None
    experts: torch.Tensor | None = None
    """The experts that vLLM chose for each token of the chunk [C, layers, k], where samples say them."""


@dataclass
class Packed:
    """One micro-batch.

    T tokens, N loss tokens over all samples. A context rank has a chunk of C = T / context tokens, which predict n of
    the loss tokens; without context parallelism that is all of them.
    """

    samples: list[Sample]
    tokens: torch.Tensor
    """The chunk [1, C]."""
    predictors: torch.Tensor
    """Index in [0, C) of the token whose hidden state predicts each of the n loss tokens [n]."""
    targets: torch.Tensor
    """The loss tokens that the chunk predicts [n]."""
    places: torch.Tensor
    """Index in [0, N) of each of them [n]."""
    lengths: list[int]
    """Loss tokens of each sample, in the order of `samples`; they sum to N."""
    params: PackedTokens = field(repr=False, default_factory=PackedTokens)
    padding_tokens: int = 0
    """Of the chunk."""

    def field(self, name: str) -> torch.Tensor | None:
        """Return a field of all samples at their loss tokens [N], on the device; None where they don't have it."""
        if not self.samples or name not in self.samples[0].fields:
            return None
        return torch.cat([sample.at_loss_tokens(name) for sample in self.samples]).to(self.tokens.device)

    def put(self, name: str, values: torch.Tensor) -> None:
        """Set a field of all samples: `values` of their loss tokens [N]."""
        for sample, part in zip(self.samples, values.split(self.lengths), strict=True):
            sample.put(name, part)


def pack(
    groups: Sequence[Sequence[Sample]],
    multiple: int,
    share_prompts: bool,
    device: torch.device,
    chunk: int = 0,
    chunks: int = 1,
    pixels: Pixels | None = pixels_of,
) -> Packed:
    """Lay out a micro-batch, and take one of the equal chunks of its tokens.

    A chunk's length is a multiple of `multiple` (sequence parallel); a sequence of its own fills up the last ones. The
    samples of a group must have the same prompt when `share_prompts` is set. A micro-batch without samples has chunks
    of `multiple` tokens that predict nothing: a rank that has fewer micro-batches than its neighbours runs it in their
    stead. `pixels`: where images are looked at, which is on the first pipeline stage.
    """
    pieces, positions, predictors, targets = ([], [], [], [])  # type: tuple[list[torch.Tensor], ...]
    sequences: list[QuerySequence] = []
    samples: list[Sample] = []
    images = ImageLayout(pixels)
    routed: list[tuple[Sample | None, slice]] = []
    threefold = any("positions" in sample.fields for group in groups for sample in group)
    cursor = 0

    def lay(tokens: torch.Tensor, first_position: int, of: Sample | None, own: torch.Tensor | None = None) -> int:
        nonlocal cursor
        routed.append((of, slice(first_position, first_position + len(tokens))))
        pieces.append(tokens)
        plain = torch.arange(first_position, first_position + len(tokens))
        positions.append((plain.expand(3, -1) if threefold else plain) if own is None else own)
        cursor += len(tokens)
        return cursor - len(tokens)

    for group in groups:
        for sharing in [list(group)] if share_prompts and len(group) > 1 else [[sample] for sample in group]:
            prompt, own = sharing[0].prompt, sharing[0].fields.get("positions")
            start = lay(prompt, 0, sharing[0], own)
            images.lay(sharing[0], start, again=sharing[0] is not group[0])
            after = len(prompt) if own is None else int(own.max()) + 1
            shared = slice(start, cursor)
            if len(sharing) > 1:
                sequences.append(QuerySequence(start, cursor))
            for sample in sharing:
                response = sample.response
                response_start = lay(response[:-1], after, sample)
                if len(sharing) == 1:
                    sequences.append(QuerySequence(start, cursor))
                elif cursor > response_start:
                    sequences.append(QuerySequence(response_start, cursor, shared))
                # The first response token is predicted by the prompt's last token, each later one by its predecessor.
                before = torch.arange(response_start - 1, response_start - 1 + len(response))
                before[0] = start + len(prompt) - 1
                predictors.append(before[sample.loss_mask])
                targets.append(response[sample.loss_mask])
                samples.append(sample)
    real, whole = cursor, multiple * chunks
    padding = -cursor % whole if cursor else whole
    if padding:
        sequences.append(QuerySequence(lay(torch.zeros(padding, dtype=torch.int64), 0, None), cursor))
    size = cursor // chunks
    start, end = size * chunk, size * (chunk + 1)
    nothing = torch.zeros(0, dtype=torch.int64)
    predicting = torch.cat([nothing, *predictors])  # [N]
    places = ((predicting >= start) & (predicting < end)).nonzero()[:, 0]
    return Packed(
        samples=samples,
        tokens=torch.cat(pieces)[None, start:end].long().to(device),
        predictors=(predicting[places] - start).to(device),
        targets=torch.cat([nothing, *targets])[places].to(device),
        places=places.to(device),
        lengths=[len(target) for target in targets],
        params=_params(
            size,
            current().attention(AttentionLayout(tuple(sequences), device)),
            torch.cat(positions, dim=-1)[..., start:end].to(device),
            images.of_chunk(start, end, device),
            choices_of(routed, slice(start, end), device),
        ),
        padding_tokens=max(0, end - max(start, real)),
    )


def _params(
    size: int, attend: Attend, positions: torch.Tensor, images: Images | None, experts: torch.Tensor | None
) -> PackedTokens:
    """Say that the chunk is one sequence: rotary angles are given per token, and the attention has its own layout."""
    length = torch.tensor([0, size], dtype=torch.int32)  # on the host: whoever reads it does not wait for the device
    return PackedTokens(
        qkv_format="thd",
        cu_seqlens_q=length,
        cu_seqlens_kv=length,
        max_seqlen_q=size,
        max_seqlen_kv=size,
        attend=attend,
        positions=positions,
        images=images,
        experts=experts,
    )
