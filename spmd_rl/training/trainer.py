"""This rank's shard of the policy and of the reference: what they say of samples, and the policy's update."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from spmd_rl.algorithms.table import find_loss
from spmd_rl.config.config import Config
from spmd_rl.distributed.layout import TrainLayout
from spmd_rl.distributed.status import doing
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.training.forward import run_passes
from spmd_rl.training.megatron_config import transformer_config
from spmd_rl.training.model import PolicyModel, build_model
from spmd_rl.training.offload import Offloaded, Releasable, gradient_buffers, parameter_buffers
from spmd_rl.training.optimizer import PolicyOptimizer, wrap_for_gradients
from spmd_rl.training.packing import Packed, TrainSample, pack
from spmd_rl.training.parallel import Place

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Load = Callable[[dict[str, torch.Tensor], str], None]
"""Fills a shard's weights from a Hugging Face directory."""


@dataclass
class Learned:
    """What one optimizer step tells rank 0; the sums are over this rank's tokens and only on ranks that report."""

    updated: bool
    grad_norm: float
    gap_max: float = 0.0
    broken: str = ""
    """Where the update was not made: a parameter whose gradient is not finite on this rank."""
    sums: dict[str, float] = field(default_factory=dict)


class Trainer:
    """Megatron-Core's side of a rank."""

    def __init__(
        self,
        config: Config,
        shape: ModelShape,
        layout: TrainLayout,
        place: Place,
        device: torch.device,
        load: Load,
    ):
        self.config, self.shape, self.layout, self.place, self.device = config, shape, layout, place, device
        self.dtype = DTYPES[config.model.dtype]
        self.token_loss = find_loss(config.algorithm)
        self.policy = self._build(config.model.path, load)
        self.reference: PolicyModel | None = None
        if config.algorithm.kl_coefficient > 0.0:
            self.reference = self._build(config.model.reference_path or config.model.path, load)
            self.reference.requires_grad_(False)
        self.wrapped = wrap_for_gradients(self.policy)
        self.optimizer = PolicyOptimizer(self.wrapped, config.train, self.dtype)
        self.gradients = Releasable(gradient_buffers(self.wrapped))
        self.gradients.release()
        self.weights_on_device = Offloaded(parameter_buffers(self.wrapped))
        self.reference_on_device = Offloaded(list(self.reference.parameters()) if self.reference else [])
        self.reference_on_device.offload()

    def _build(self, path: str, load: Load) -> PolicyModel:
        config = transformer_config(
            self.shape, self.layout, self.dtype, self.config.parallel.sequence, self.config.train.recompute
        )
        with doing("builds the model"):
            model = build_model(self.shape, self.layout, config).to(self.device)
        with doing(f"loads weights from {path}"):
            load(model.weights(), path)
        return model

    def parameters(self) -> dict[str, torch.Tensor]:
        """The policy's weights by their Megatron names, see PolicyModel.weights."""
        return self.policy.weights()

    def release(self) -> None:
        """Leave the device to the engine, after the engine has the weights."""
        self.gradients.release()
        self.weights_on_device.offload()
        self.optimizer.offload()

    def restore(self) -> None:
        """Take the device back; the gradients are zeroed before they are used."""
        self.weights_on_device.onload()
        self.optimizer.onload()

    def pack(self, microbatches: Sequence[Sequence[Sequence[TrainSample]]], share_prompts: bool) -> list[Packed]:
        """Lay out micro-batches for this rank's layout."""
        multiple = self.place.tensor_size if self.policy.config.sequence_parallel else 1
        # The schedule of a virtual pipeline takes micro-batches in rounds of as many as there are stages.
        rest = -len(microbatches) % self.layout.pipeline if self.layout.virtual > 1 else 0
        laid = [*microbatches, *([] for _ in range(rest))]
        chunk, chunks = self.place.context_rank, self.place.context_size
        return [pack(groups, multiple, share_prompts, self.device, chunk, chunks) for groups in laid]

    def _run(
        self, model: Sequence[torch.nn.Module], policy: PolicyModel, packs: list[Packed], use: Callable, backward: bool
    ) -> None:
        run_passes(
            model,
            policy,
            self.place,
            packs,
            self.shape.vocabulary,
            self.config.rollout.temperature,
            self.config.train.logprob_chunk_tokens,
            use,
            backward,
        )

    @torch.no_grad()
    def score(self, packs: list[Packed], which: str) -> None:
        """Write each sample's log-probabilities under the `policy` or the `reference` into it, on the last stage."""
        model = self.policy if which == "policy" else self.reference
        assert model is not None

        def use(packed: Packed, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
            for sample, part in zip(packed.samples, logprobs.split(packed.lengths), strict=True):
                setattr(sample, f"{which}_logprobs", part.clone())
            return logprobs.sum()

        model.eval()
        self._run(model, model, packs, use, backward=False)
        model.train()

    def learn(
        self, packs: list[Packed], advantages: dict[int, float], weights: dict[int, float], learning_rate: float
    ) -> Learned:
        """One optimizer step on these micro-batches; the loss is the sum of weight * token loss over all ranks."""
        self.gradients.restore()
        self.optimizer.zero_gradients()
        learned = Learned(updated=False, grad_norm=0.0)

        def use(packed: Packed, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
            samples = packed.samples
            if not samples:
                return logprobs.sum()
            lengths = torch.tensor(packed.lengths, device=self.device)

            def of_tokens(values: dict[int, float]) -> torch.Tensor:
                each = torch.tensor([values[sample.id] for sample in samples], device=self.device)
                return each.repeat_interleave(lengths)

            def joined(name: str) -> torch.Tensor | None:
                parts = [getattr(sample, name) for sample in samples]
                return None if parts[0] is None else torch.cat(parts).to(self.device)

            before = joined("policy_logprobs")
            loss, parts = self.token_loss(
                logprobs,
                # On-policy, the policy before the update is the policy: the ratio is 1 and only its gradient counts.
                logprobs.detach() if before is None else before,
                of_tokens(advantages),
                joined("reference_logprobs"),
                entropy,
            )
            weight = of_tokens(weights)
            if self.place.reports:
                self._report(learned, weight, parts, joined("rollout_logprobs"), before, logprobs, entropy)
            return (weight * loss).sum()

        self._run(self.wrapped, self.policy, packs, use, backward=True)
        with doing("optimizer step"):
            learned.updated, learned.grad_norm = self.optimizer.step(learning_rate)
        if not learned.updated:
            learned.broken = first_not_finite(
                (name, weight.main_grad) for name, weight in self.policy.named() if weight.requires_grad
            )
        return learned

    def broken(self) -> str:
        """What of this rank's weights and optimizer is not finite, its first; nothing in a sound run."""
        weights = first_not_finite(self.parameters().items())
        return weights or first_not_finite(self.optimizer.tensors())

    @staticmethod
    def _report(
        learned: Learned,
        weight: torch.Tensor,
        parts: dict[str, torch.Tensor],
        rollout: torch.Tensor | None,
        before: torch.Tensor | None,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
    ) -> None:
        assert rollout is not None
        gap = (rollout - (logprobs if before is None else before)).detach().abs()
        learned.gap_max = max(learned.gap_max, float(gap.max()))
        for name, value in {
            "tokens": torch.ones_like(gap).sum(),
            "actor/pg_loss": (weight * parts["pg_loss"]).sum(),
            "actor/kl_loss": (weight * parts["kl_loss"]).sum(),
            "actor/pg_clipfrac": parts["clipped"].sum(),
            "actor/ppo_kl": parts["ppo_kl"].sum(),
            "actor/entropy": entropy.detach().sum(),
            "correction/logprob_gap_mean": gap.sum(),
        }.items():
            learned.sums[name] = learned.sums.get(name, 0.0) + float(value)


def first_not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The name of the first that holds an inf or a nan; "" for none."""
    return next((name for name, tensor in tensors if not _finite(tensor)), "")


def _finite(tensor: torch.Tensor) -> bool:
    # No inf or nan hides in a sum, which reads once; large values can overflow in it, and are looked at one by one.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())
