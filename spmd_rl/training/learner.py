"""A model in training: with gradients and an optimizer."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from spmd_rl.config.config import TrainConfig
from spmd_rl.data.answers import Learned, largest
from spmd_rl.distributed.status import doing
from spmd_rl.platforms import current
from spmd_rl.training.expert_balance import ExpertBalance
from spmd_rl.training.experts import load_imbalance
from spmd_rl.training.forward import run_passes
from spmd_rl.training.offload import Releasable, gradient_buffers
from spmd_rl.training.optimizer import Optimizer, OptimizerSettings, wrap_for_gradients
from spmd_rl.training.packing import Packed
from spmd_rl.training.sharded_model import ShardedModel, first_not_finite

_TOTAL = "total"
"""Among the sums while they are read."""


@dataclass
class LossResult:
    """Hold what a loss says of a micro-batch that has loss tokens."""

    total: torch.Tensor
    """The sum of weight * token loss, with its gradient."""
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """For the log, over the loss tokens; `tokens`: how many there are."""
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
    """The same, of the largest of a token."""
    losses: torch.Tensor | None = None
    """Weight * loss of each loss token [N], without gradient: they find the samples that an update was skipped for."""


Loss = Callable[..., LossResult]
"""(micro-batch, what the head says of its loss tokens [N], ...) -> the loss; samples' fields are read by name."""


@dataclass(frozen=True)
class Limits:
    """Hold beyond what no update is made."""

    grad_norm: float | None = None
    """The gradient's norm before it is clipped."""
    kl: float | None = None
    """Mean over tokens of log-probability when they were written - now."""


NO_LIMITS = Limits()


class Learner:
    """Has a model, Megatron's gradient buffers around it, and its optimizer."""

    def __init__(self, model: ShardedModel, settings: OptimizerSettings):
        """`model`: not loaded yet."""
        self.model = model
        self.wrapped = wrap_for_gradients(model.module)
        self.gradients = Releasable(gradient_buffers(self.wrapped))
        self.gradients.release()  # the optimizer copies the weights, and needs their room
        current().give_back_memory()  # where the weights lay until now
        model.load()  # into Megatron's buffer, where the weights lie from now on
        self.optimizer = Optimizer(self.wrapped, settings, model.dtype)
        balance = settings.moe_aux_loss_coefficient if isinstance(settings, TrainConfig) else 0.0
        self.balance = ExpertBalance(model.module, balance, model.place)

    def learn(self, packs: Sequence[Packed], loss: Loss, rate: float, limits: Limits = NO_LIMITS) -> Learned:
        """Make one optimizer step on these micro-batches; the loss is the sum of its totals over all ranks."""
        model, told = self.model, list[LossResult]()
        losses: list[tuple[Packed, torch.Tensor]] = []
        self.gradients.restore()
        self.optimizer.zero_gradients()

        def use(packed: Packed, *rows: torch.Tensor) -> torch.Tensor:
            if not sum(packed.lengths):
                return rows[0].sum()
            result = loss(packed, *rows)
            told.append(LossResult(result.total.detach(), result.sums, result.maxima))
            if result.losses is not None:
                losses.append((packed, result.losses))
            return result.total

        self.balance.begin(packs)
        run_passes(self.wrapped, model.module.last, model.place, packs, model.head, use, backward=True)
        sums, maxima = _read(told)
        # Ranks that compute the same losses are asked too: one that errs alone would go on with other weights.
        total, broken = sums.pop(_TOTAL, 0.0), [name for name, value in sums.items() if not math.isfinite(value)]
        if not broken and not math.isfinite(total):
            broken = ["the loss"]
        if not model.place.reports:
            sums, maxima = {}, {}
        sums |= self.balance.end()
        if model.shape.head == "lm" and (imbalance := load_imbalance(model.module.layers)) is not None:
            maxima["moe/load_imbalance"] = imbalance
        with doing("optimizer step"):
            beyond = "" if limits.kl is None else self._beyond_kl(sums, limits.kl)
            bound = math.inf if limits.grad_norm is None else limits.grad_norm
            updated, grad_norm = self.optimizer.step(rate, bound, sound=not broken and not beyond)
        learned, rank = Learned(updated, grad_norm, [sums] if sums else [], maxima), model.place.rank
        if not updated:
            if not beyond and bound < grad_norm < math.inf:
                beyond = f"the norm of the gradient is {grad_norm:.4g}, above train.grad_norm_bound = {bound:g}"
            learned.beyond, learned.suspects = beyond, suspects(losses)
            if broken:
                learned.losses_broken = [f"on rank {rank} {', '.join(broken)}"]
            gradients = ((name, weight.main_grad) for name, weight in model.module.named() if weight.requires_grad)
            sound = all(map(math.isfinite, self.wrapped[0].own_totals))
            if not sound and (first := first_not_finite(gradients)):
                learned.gradients_broken = [f"{first} on rank {rank}"]
        return learned

    def _beyond_kl(self, sums: Mapping[str, float], bound: float) -> str:
        """Return, alike on all ranks, what to say when the policy has moved too far; nothing where it has not."""
        far = sums.get("correction/kl", 0.0) + sums.get("actor/ppo_kl", 0.0)
        device = next(iter(self.model.weights().values())).device
        both = torch.tensor([far, sums.get("tokens", 0.0)], dtype=torch.float32, device=device)
        dist.all_reduce(both)
        kl = float(both[0] / both[1])
        if not abs(kl) > bound:  # one that is no number is the sums'
            return ""
        return f"the policy is {kl:.4g} from the one that wrote the samples, beyond train.kl_bound = {bound:g}"

    def broken(self) -> str:
        """Return what of this rank's weights and optimizer is not finite, its first; nothing in a sound run."""
        return self.model.broken() or first_not_finite(self.optimizer.tensors())

    def release(self) -> None:
        """Keep nothing but the weights on the device: the optimizer waits on the host, gradients are made anew."""
        self.gradients.release()
        self.optimizer.offload()

    def offload(self) -> None:
        """Leave the device."""
        self.release()
        self.model.offload()

    def onload(self) -> None:
        """Take the device back: the weights; the gradients are zeroed before they are used."""
        self.model.onload()


def _read(told: Sequence[LossResult]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the sums, the losses' own among them, and maxima over micro-batches: the device is waited for once."""
    summed = [one.sums | {_TOTAL: one.total} for one in told]
    values = [value for one, sums in zip(told, summed, strict=True) for value in (*sums.values(), *one.maxima.values())]
    on_host = iter(torch.stack([value.detach().float() for value in values]).tolist() if values else ())
    sums, maxima = dict[str, float](), dict[str, float]()
    for one, of_one in zip(told, summed, strict=True):
        for name in of_one:
            sums[name] = sums.get(name, 0.0) + next(on_host)
        for name in one.maxima:
            maxima[name] = max(maxima.get(name, 0.0), next(on_host))
    return sums, maxima


def suspects(losses: Sequence[tuple[Packed, torch.Tensor]]) -> list[tuple[int, float]]:
    """Return the samples with the largest sums of losses, by id; infinite where one is not finite."""
    found = []
    for packed, by_token in losses:
        sums = [float(part.abs().sum()) for part in by_token.split(packed.lengths)]
        sizes = [one if math.isfinite(one) else math.inf for one in sums]
        found += [(sample.id, size) for sample, size in zip(packed.samples, sizes, strict=True)]
    return largest(found)


def take_turns(learners: Mapping[str, Learner], name: str) -> dict[str, float]:
    """Have one learner on the device, the others away; returns the seconds that each move took, as critic_onload.

    One that has no others is only brought back, and nothing is returned.
    """
    seconds = {}
    for other in (*(other for other in learners if other != name), name):
        started = time.perf_counter()
        if other == name:
            learners[name].onload()
        else:
            learners[other].offload()
        seconds[f"{other}_{'onload' if other == name else 'offload'}"] = time.perf_counter() - started
    return seconds if len(learners) > 1 else {}
