"""One rank's part of generalized advantage estimation: fields of its samples; only sums of them leave the rank."""

import time
from collections.abc import Mapping, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from spmd_rl.algorithms.gae import generalized_advantages, token_rewards
from spmd_rl.algorithms.kl import kl_estimate
from spmd_rl.data.answers import Estimated
from spmd_rl.distributed.sample import Sample
from spmd_rl.distributed.verb import verb
from spmd_rl.worker.trainer import Trainer


class GaeEstimator:
    """Estimates advantages of the trainer's samples, where their values are: on the last pipeline stage."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.algorithm = trainer, trainer.config.algorithm

    @verb
    def estimate_gae(self, rewards: Mapping[int, float], beta: float) -> Estimated:
        """Give the samples that this rank trains on the fields advantages and returns, from their values.

        `rewards`: of samples, by id. `beta`: KL coefficient, of the divergence from the reference in a token's reward.
        """
        valued = [one for one in self.trainer.samples.values() if "values" in one.fields]
        for one in valued:  # one without loss tokens has these fields too: it is packed with others
            one.fields |= {name: torch.zeros_like(one.fields["values"]) for name in ("advantages", "returns")}
        samples = [one for one in valued if one.loss_tokens]
        if not samples:
            return Estimated([], 0.0)
        values = _padded(samples, "values")  # [S, N]
        lengths = torch.tensor([one.loss_tokens for one in samples], device=values.device)
        kl, started = None, time.perf_counter()
        if self.algorithm.kl_in_reward:
            before, reference = (_padded(samples, f"{model}_logprobs") for model in ("policy", "reference"))
            kl = kl_estimate(before, reference, self.algorithm.kl_estimator)  # 0 where both are filled up with zeros
        kl_seconds = time.perf_counter() - started
        earned = torch.tensor([rewards[one.id] for one in samples], dtype=values.dtype, device=values.device)
        tokens = token_rewards(earned, lengths, values.shape[1], kl, beta)
        advantages, returns = generalized_advantages(tokens, values, self.algorithm.gamma, self.algorithm.lam)
        for row, one in enumerate(samples):
            for name, found in (("advantages", advantages), ("returns", returns)):
                one.put(name, found[row, : one.loss_tokens])
        if not self.trainer.place.reports:
            return Estimated([], kl_seconds)
        real = torch.arange(values.shape[1], device=values.device) < lengths[:, None]
        by_token = {"advantages": advantages, "returns": returns, "values": values}
        told = {name: _spread(numbers[real]) for name, numbers in by_token.items()}
        by_sample = {"rewards": tokens.sum(1), "kl": values[:0, 0] if kl is None else kl.sum(1) / lengths}
        told |= {name: _spread(numbers) for name, numbers in by_sample.items()}
        return Estimated([told], kl_seconds)

    @verb
    def whiten(self, field: str, mean: float, scale: float) -> list[list[float]]:
        """Make (value - mean) * scale of a field at each loss token, where the samples have it; kept within
        algorithm.advantage_clip. Where that is set, the ranks that report say what it came to, as Spread.of takes it.
        """
        bound, made = self.algorithm.advantage_clip, list[torch.Tensor]()
        for sample in self.trainer.samples.values():
            if field in sample.fields:
                moved = (sample.at_loss_tokens(field) - mean) * scale
                made.append(moved if bound is None else moved.clamp(-bound, bound))
                sample.put(field, made[-1])
        if bound is None or not made or not self.trainer.place.reports:
            return []
        return [_spread(torch.cat(made))]


def _padded(samples: Sequence[Sample], field: str) -> torch.Tensor:
    """Return a field at the loss tokens of each sample, filled up with zeros [S, N]."""
    return pad_sequence([sample.at_loss_tokens(field) for sample in samples], batch_first=True)


def _spread(numbers: torch.Tensor) -> list[float]:
    """Return what algorithms.token_statistics.Spread.of takes, computed in float64 on the host."""
    numbers = numbers.cpu().double()
    if not numbers.numel():
        return [0.0, 0.0, 0.0, float("inf"), float("-inf")]
    mean = numbers.mean()
    squares = (numbers - mean).square().sum()
    return [float(len(numbers)), *map(float, (mean, squares, numbers.min(), numbers.max()))]
