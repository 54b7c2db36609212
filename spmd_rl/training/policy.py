"""The policy's loss over a micro-batch, from the fields of its samples."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from spmd_rl.algorithms.correction import no_correction
from spmd_rl.training.learner import LossResult
from spmd_rl.training.packing import Packed


@dataclass(frozen=True)
class PolicyLoss:
    """Reads advantages, weights and rollout_logprobs; policy_logprobs and reference_logprobs where they were scored."""

    token_loss: Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]
    """Of algorithms/table.py, as the next."""
    correction: Callable[..., tuple[torch.Tensor, torch.Tensor]] = no_correction
    against_rollout: bool = False
    """The ratio is against the policy that wrote the samples: algorithm.old_logprobs = rollout."""

    @cached_property
    def _of_samples(self) -> bool:
        """Return whether the loss asks where one sample ends and the next begins."""
        return "lengths" in inspect.signature(self.token_loss).parameters

    def __call__(self, packed: Packed, logprobs: torch.Tensor, entropy: torch.Tensor) -> LossResult:
        advantages, weights, rollout = (
            packed.field(name) for name in ("advantages", "weights", "rollout_logprobs")
        )  # each [N]
        # On-policy, the policy before the update is the policy: the ratio is 1 and only its gradient counts.
        now = logprobs.detach()
        before = now if (scored := packed.field("policy_logprobs")) is None else scored
        if rollout is None:
            if self.against_rollout or self.correction is not no_correction:
                knob, other = ("old_logprobs", "trainer") if self.against_rollout else ("correction", "off")
                raise ValueError(
                    f"algorithm.{knob}: the samples carry no rollout_logprobs, the log-probabilities of the policy "
                    f"that wrote them; put them into that field, or set it to {other}"
                )
            rollout = before
        if self.against_rollout:
            before = rollout  # nothing is left to correct: each weight is exactly 1
        correct, bounded = self.correction(before, rollout, packed.lengths)
        more = {"lengths": packed.lengths} if self._of_samples else {}
        loss, parts = self.token_loss(
            logprobs, before, correct * advantages, packed.field("reference_logprobs"), entropy, **more
        )
        gap = (rollout - (now if self.against_rollout else before)).abs()
        return LossResult(
            total=(weights * loss).sum(),
            sums={
                "tokens": torch.ones_like(gap).sum(),
                "actor/pg_loss": (weights * parts["pg_loss"]).sum(),
                "actor/kl_loss": (weights * parts["kl_loss"]).sum(),
                "actor/pg_clipfrac": parts["clipped"].sum(),
                "actor/ppo_kl": parts["ppo_kl"].sum(),
                "actor/entropy": entropy.detach().sum(),
                "correction/logprob_gap_mean": gap.sum(),
                "correction/kl": (rollout - before).sum(),
                "correction/weight_mean": correct.sum(),
                "correction/clipped_fraction": bounded.sum(),
            },
            maxima={"correction/logprob_gap_max": gap.max()},
            losses=(weights * loss).detach(),
        )
