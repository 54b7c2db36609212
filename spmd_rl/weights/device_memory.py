"""Count what a rank's models take of its device in each phase; what a pass computes in between is not in it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from spmd_rl.config.check_critic import read_critic
from spmd_rl.config.check_reward_models import read_reward_shape
from spmd_rl.config.config import Config
from spmd_rl.config.engine_cache import BYTES
from spmd_rl.config.names import Phase
from spmd_rl.distributed.layout import RolloutLayout, TrainLayout
from spmd_rl.errors import ConfigError, Problem
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.weights.families import megatron_shard, vllm_shard
from spmd_rl.weights.transfer.boxes import Index

_GRADIENT, _MASTER, _MOMENTS = 4, 4, 8
"""Bytes of a parameter: gradients are summed in float32; AdamW has two moments, and in half precision its own weights.
"""
STATE_BYTES = _MASTER + _MOMENTS
PART_BYTES = 2 << 30
"""Of an optimizer's state that waits on the host, about so much is on the device at once; of one parameter, all."""
MAPPED_BYTES = 64 << 20
"""Of a file of weights, about so much is in a host's memory at once while it is read; of one tensor, all."""
PAGE_BYTES = 2 << 20
"""A page of a host's heap (launch/env.cpu.sh): what is allocated and not written has memory where it begins."""
_VISION, _PROJECTOR = "visual.", "visual.merger."


@dataclass(frozen=True)
class LearnerBytes:
    """Hold what a model in training takes on one rank."""

    weights: int
    gradients: int
    masters: int
    """Of the optimizer: its float32 weights, from the start."""
    moments: int
    """Of the optimizer, from its first step."""
    part: int
    """Of the optimizer, at most what is on the device at once: in a step, and while it is saved."""

    @property
    def optimizer(self) -> int:
        """Bytes of all that the optimizer keeps."""
        return self.masters + self.moments

    def in_training(self) -> dict[str, int]:
        """Return what is there in an optimizer step."""
        return {"weights": self.weights, "gradients": self.gradients, "optimizer": self.part}


@dataclass(frozen=True)
class RankBytes:
    """Hold what one rank's models take, each where it is."""

    learners: Mapping[str, LearnerBytes]
    """`policy` first."""
    reference: int = 0
    judges: Mapping[str, int] = field(default_factory=dict)
    """Reward models, by name."""
    engine: int = 0
    """Weights of vLLM."""
    cache: int = 0
    buckets: int = 0
    """Messages of a refresh that are held at once."""
    files: int = 0
    """Of the policy's files, the most that is in the host's memory while they are read."""
    unwritten: int = 0
    """Of vLLM's weights, what has memory of the host's before they are written."""

    def phases(self) -> dict[str, int]:
        """Return the bytes on the device at the peak of each phase, in the order of a step."""
        return {phase: sum(parts.values()) for phase, parts in self.parts().items()}

    def parts(self) -> dict[str, dict[str, int]]:
        """Return what makes the peak of each phase, in the order of a step."""
        policy, awake = self.learners["policy"], {"engine": self.engine, "cache": self.cache}
        weights = {"weights": policy.weights}
        refresh = weights | {"engine": self.engine, "buckets": self.buckets}
        found: dict[str, dict[str, int]] = {
            Phase.START: _larger(self._building(), awake),
            Phase.TO_ROLLOUT: _larger(refresh, awake),
            Phase.ROLLOUT: awake,
            Phase.TO_TRAINING: weights,
        }
        if self.judges:
            found[Phase.REWARD_MODEL] = weights | {"reward model": max(self.judges.values())}
        found[Phase.POLICY_LOGPROBS] = weights
        if self.reference:
            found[Phase.REFERENCE_LOGPROBS] = weights | {"reference": self.reference}
        if "critic" in self.learners:
            critic = self.learners["critic"]
            found[Phase.CRITIC_VALUES] = {"weights": critic.weights}
            found[Phase.CRITIC_UPDATE] = critic.in_training()
        found[Phase.UPDATE] = policy.in_training()
        saved = max(self.learners.values(), key=lambda one: one.weights + one.part)
        found[Phase.CHECKPOINT] = {"weights": saved.weights, "optimizer": saved.part}
        return found

    def _building(self) -> dict[str, int]:
        """Return the peak while the models are built, one beside those that are there."""
        there = dict.fromkeys(("weights", "optimizer", "gradients", "reference", "reward model"), 0)
        peak = dict(there)
        for name, one in self.learners.items():
            # Megatron lays the weights out a second time, beside the gradients; then the optimizer copies its part.
            twice = there | {"weights": there["weights"] + 2 * one.weights, "gradients": one.gradients}
            copied = there | {"weights": there["weights"] + one.weights}
            copied["optimizer"] += one.masters
            peak = _larger(peak, _larger(twice, copied))
            there["weights"] += one.weights
            there["optimizer"] += one.masters
            if name == "policy":
                peak = _larger(peak, there | {"reference": self.reference})
        return max([peak, *(there | {"reward model": size} for size in self.judges.values())], key=_total)


def _total(parts: Mapping[str, int]) -> int:
    return sum(parts.values())


def _larger(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return one if _total(one) > _total(other) else other


def rank_bytes(
    config: Config, shape: ModelShape, train: TrainLayout, rollout: RolloutLayout, rank: int, buckets: int = 0
) -> RankBytes:
    """Return what a rank's models take. A rollout.cache_gib of None is 0 here, and so is a model that can't be read."""
    size = BYTES[config.model.dtype]
    shard = megatron_shard(shape, train, rank)
    policy = learner_bytes(shard.params, train, config)
    learners = {"policy": policy}
    if config.algorithm.uses_critic and (critic := _shape(lambda: read_critic(config).shape, train)):
        learners["critic"] = learner_bytes(
            megatron_shard(critic, train.suited_to(critic.layers), rank).params, train, config
        )
    judges = {}
    for name, model in config.reward.models.items():
        if judge := _shape(partial(read_reward_shape, name, model), train):
            shard = megatron_shard(judge, train.suited_to(judge.layers), rank)
            judges[name] = shard.elements * BYTES[model.dtype or config.model.dtype]
    engine = {name: size * math.prod(extent) for name, extent in vllm_shard(shape, rollout, rank).params.items()}
    return RankBytes(
        learners,
        policy.weights if config.algorithm.uses_reference else 0,
        judges,
        sum(engine.values()),
        int((config.rollout.cache_gib or 0) * 2**30),
        buckets,
        max(min(policy.weights, MAPPED_BYTES), size * max(math.prod(piece.shape) for piece in shard.pieces)),
        sum(min(PAGE_BYTES, one) for one in engine.values()),
    )


def _shape(read: Callable[[], ModelShape], train: TrainLayout) -> ModelShape | None:
    try:
        found = read()
    except ConfigError:  # it is among what a run is refused for
        return None
    return found if found.layers >= train.pipeline * train.virtual else None


def learner_bytes(params: Mapping[str, Index], train: TrainLayout, config: Config) -> LearnerBytes:
    """Return what training these parameters of a rank takes; the optimizer's part is shared by the ranks that hold the
    same."""
    size = BYTES[config.model.dtype]
    shares = train.data * train.context
    expert_shares = train.stage_ranks // (train.expert * train.expert_tensor)
    trained = part = largest = 0
    for name, extent in params.items():
        if _frozen(name, config.model.freeze):
            continue
        elements = math.prod(extent)
        trained += elements
        largest = max(largest, elements)
        part += elements // (expert_shares if ".experts." in name else shares)
    weights = size * sum(map(math.prod, params.values()))
    masters = _MASTER if size == 2 else 0
    # A rank's share may have the largest parameter in full.
    at_once = min((masters + _MOMENTS) * part, max(PART_BYTES, (masters + _MOMENTS) * largest))
    return LearnerBytes(weights, _GRADIENT * trained, masters * part, _MOMENTS * part, at_once)


def parts_of_sizes(sizes: Sequence[int], limit: int = PART_BYTES) -> list[range]:
    """Part bytes, in their order, so that no part is larger than the limit but one of a single piece."""
    starts, held = [0], 0
    for n, size in enumerate(sizes):
        if n > starts[-1] and held + size > limit:
            starts, held = [*starts, n], 0
        held += size
    return [range(*cut) for cut in pairwise([*starts, len(sizes)]) if sizes]


def _frozen(name: str, parts: tuple[str, ...]) -> bool:
    if _VISION not in name:
        return False
    return ("projector" if _PROJECTOR in name else "vision") in parts


def memory_problems(config: Config, by_rank: Mapping[int, RankBytes], device: int) -> list[Problem]:
    """Return that a rank's models don't fit into a device of so many bytes, of the rank and phase that need most."""
    peaks = {(rank, phase): size for rank, held in by_rank.items() for phase, size in held.phases().items()}
    (rank, phase), most = max(peaks.items(), key=lambda item: item[1])
    if most <= device:
        return []
    held, gib = by_rank[rank], 2**30
    if most == held.engine + held.cache:
        parts = {"the engine's weights": held.engine, "its cache": held.cache}
        knob, value, way = "rollout.cache_gib", config.rollout.cache_gib, "lower it, or raise rollout.tensor"
    else:
        parts = held.parts()[phase]
        knob, value = "parallel.tensor", config.parallel.tensor
        way = "raise it, parallel.pipeline or parallel.expert"
        if phase == Phase.START:
            way += ", or start more ranks, which share the optimizer"
    sizes = ", ".join(f"{name} {size / gib:.2f}" for name, size in parts.items() if size)
    met = f"in {phase} rank {rank} holds {most / gib:.2f} GiB of models ({sizes}), and a device has {device / gib:.2f}"
    return [Problem(knob, value, met, way)]
