"""The policy's loss over a micro-batch, from the fields of its samples."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from spmd_rl.training.learner import LossResult
from spmd_rl.training.packing import Packed


@dataclass(frozen=True)
class PolicyLoss:
    """Reads advantages, weights and rollout_logprobs; policy_logprobs and reference_logprobs where they were scored."""

    token_loss: Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]
    """Of algorithms/table.py."""

    def __call__(self, packed: Packed, logprobs: torch.Tensor, entropy: torch.Tensor) -> LossResult:
        advantages, weights, rollout = (
            packed.field(name) for name in ("advantages", "weights", "rollout_logprobs")
        )  # each [N]
        # On-policy, the policy before the update is the policy: the ratio is 1 and only its gradient counts.
        before = logprobs.detach() if (scored := packed.field("policy_logprobs")) is None else scored
        loss, parts = self.token_loss(logprobs, before, advantages, packed.field("reference_logprobs"), entropy)
        gap = (rollout - before).abs()
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
            },
            maxima={"correction/logprob_gap_max": gap.max()},
        )
