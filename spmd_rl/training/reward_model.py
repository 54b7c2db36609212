"""This rank's shard of a frozen model that scores samples."""

from collections.abc import Sequence

import torch

from spmd_rl.distributed.layout import TrainLayout
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.training.forward import run_values
from spmd_rl.training.megatron_config import transformer_config
from spmd_rl.training.model import build_model
from spmd_rl.training.offload import Offloaded
from spmd_rl.training.packing import Packed, TrainSample
from spmd_rl.training.parallel import Place
from spmd_rl.training.trainer import DTYPES, Load

NOTHING = torch.zeros(0)


def scored_sample(id: int, tokens: torch.Tensor, shared: int) -> TrainSample:
    """A sequence [L] laid out so that its last token's value is that of its last response token.

    Its first `shared` tokens (at least one) are its prompt: those that it has in common with its group. One more token
    follows, which is never laid down, because the last one of a response isn't.
    """
    return TrainSample(id, tokens[:shared], torch.cat((tokens[shared:], tokens[-1:])), NOTHING)


class RewardModel:
    """A sequence-classification model in the policy's layout: forward passes only, on the host between uses."""

    def __init__(
        self,
        path: str,
        shape: ModelShape,
        layout: TrainLayout,
        place: Place,
        device: torch.device,
        dtype: str,
        sequence: bool,
        label: int,
        load: Load,
    ):
        assert shape.head == "value" and 0 <= label < shape.labels
        self.place, self.label = place, label
        config = transformer_config(shape, layout, DTYPES[dtype], sequence, recompute=False)
        self.model = build_model(shape, layout, config).to(device)
        self.model.requires_grad_(False)
        self.model.eval()
        load(self.model.weights(), path)
        self.on_device = Offloaded(list(self.model.parameters()))
        self.on_device.offload()

    @torch.no_grad()
    def score(self, packs: Sequence[Packed]) -> dict[int, float]:
        """Sample -> the value at its last token, of what `scored_sample` made; on ranks that report, else empty."""
        scores: dict[int, float] = {}

        def use(packed: Packed, values: torch.Tensor) -> torch.Tensor:
            if packed.samples and self.place.reports:
                lasts = torch.tensor(packed.lengths, device=values.device).cumsum(0) - 1
                found = values.index_select(0, lasts)[:, self.label].tolist()
                scores.update(zip((sample.id for sample in packed.samples), found, strict=True))
            return values.sum()

        run_values(self.model, self.model, self.place, list(packs), use, backward=False)
        return scores
