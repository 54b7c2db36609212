"""Hold this rank's shard of a model: its weights, and what it says of samples."""

from collections.abc import Iterable, Sequence

import torch

from spmd_rl.config.config import Config
from spmd_rl.distributed.layout import TrainLayout
from spmd_rl.distributed.status import doing
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.training.forward import Head, LogprobHead, ValueOfState, run_passes
from spmd_rl.training.megatron_config import transformer_config
from spmd_rl.training.model import build_model
from spmd_rl.training.offload import Offloaded
from spmd_rl.training.packing import Packed
from spmd_rl.training.parallel import Place
from spmd_rl.training.vision import freeze
from spmd_rl.weights.families import megatron_shard
from spmd_rl.weights.files.hf_reader import SCORE, load_shard

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ShardedModel:
    """A policy, a reference, a critic or a reward model, in Megatron-Core."""

    def __init__(
        self,
        config: Config,
        path: str,
        shape: ModelShape,
        layout: TrainLayout,
        place: Place,
        device: torch.device,
        dtype: str = "",
        label: int = 0,
        stored: ModelShape | None = None,
    ):
        """Build it, uninitialised: `load` reads its weights.

        `path`: a Hugging Face directory. `dtype`: the policy's where it is "". `label`: what a value head says.
        `stored`: the shape of the model in the directory, where that has no value head: it begins as zeros.
        """
        self.path, self.shape, self.layout, self.place, self.stored = path, shape, layout, place, stored
        self.dtype = DTYPES[dtype or config.model.dtype]
        self.shard = megatron_shard(shape, layout, place.rank)
        self.head: Head = (
            ValueOfState(label)
            if shape.head == "value"
            else LogprobHead(shape.vocabulary, config.rollout.temperature, config.train.logprob_chunk_tokens)
        )
        megatron = transformer_config(shape, layout, self.dtype, config.parallel.sequence, config.train)
        with doing("builds the model"):
            self.module = build_model(shape, layout, megatron).to(device)
        for tower in (chunk.visual for chunk in self.module if hasattr(chunk, "visual")):
            freeze(tower, shape, config.model.freeze)
        self._offloaded: Offloaded | None = None

    def load(self) -> None:
        """Read the weights from the directory, into where they lie now."""
        with doing(f"loads weights from {self.path}"):
            zeros = (SCORE,) if self.stored else ()
            load_shard(self.path, self.shard, self.weights(), self.stored or self.shape, zeros)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return what is trained, loaded and saved, by its Megatron name, see ModelChunks.weights."""
        return self.module.weights()

    def merged_weights(self) -> dict[str, torch.Tensor]:
        """Return the weights that the model computes with, under the names of its shard: for refresh, proof, export."""
        return self.module.weights()

    def broken(self) -> str:
        """Return which of the weights is not finite, the first of this rank; nothing in a sound run."""
        return first_not_finite(self.weights().items())

    def offload(self) -> None:
        """Move the weights to the host."""
        # Their storages are other ones once a learner has laid them into its buffers.
        self._offloaded = self._offloaded or Offloaded(list(self.module.parameters()))
        self._offloaded.offload()

    def onload(self) -> None:
        """Move the weights back to the device."""
        if self._offloaded is not None:
            self._offloaded.onload()

    @torch.no_grad()
    def forward(self, packs: Sequence[Packed], head: Head | None = None) -> list[tuple[Packed, torch.Tensor]]:
        """Return what the head says of each micro-batch's loss tokens [N], on the last stage; elsewhere nothing.

        `head`: the model's own by default.
        """
        found: list[tuple[Packed, torch.Tensor]] = []

        def use(packed: Packed, first: torch.Tensor, *others: object) -> torch.Tensor:
            found.append((packed, first))
            return first.sum()

        self.module.eval()
        run_passes(self.module, self.module.last, self.place, packs, head or self.head, use, backward=False)
        self.module.train()
        return found


def first_not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the name of the first that holds an inf or a nan; "" for none."""
    return next((name for name, tensor in tensors if not _finite(tensor)), "")


def _finite(tensor: torch.Tensor) -> bool:
    # No inf or nan hides in a sum, which reads once; large values can overflow in it, and are looked at one by one.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
