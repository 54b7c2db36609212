"""The run that is asked about, and its layouts in words."""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from spmd_rl.config.config import Config
from spmd_rl.config.engine_cache import GIB, CacheNeed, cache_room
from spmd_rl.distributed.layout import RolloutLayout, TrainLayout
from spmd_rl.estimate.micro_batch import Lengths
from spmd_rl.estimate.rank_memory import Run
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.platforms import CLUSTER, record
from spmd_rl.platforms.devices import Device

Json = dict[str, Any]
"""An answer, printed as JSON or laid out as text."""


@dataclass(frozen=True)
class Case:
    """The run that is asked about."""

    config: Config
    shape: ModelShape
    train: TrainLayout
    rollout: RolloutLayout
    ranks_per_node: int
    world_size_given: bool
    device: Device | None = None
    lengths: Lengths | None = None
    """Of a sample, on average; None: the longest that the settings allow."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.rollout.world

    @property
    def platform(self) -> str:
        """The kind of machine that is planned for, as run.platform."""
        named = self.config.run.platform
        return named if named != "auto" else self.device.platform if self.device else CLUSTER

    @property
    def run(self) -> Run:
        """Hold what memory and time depend on."""
        kernels, lengths = record(self.platform).kernels, self.lengths or Lengths.longest(self.config)
        return Run(self.config, self.shape, self.train, self.rollout, kernels, lengths)


def fewest_ranks(config: Config) -> int:
    """The smallest world that both layouts divide."""
    parallel, rollout = config.parallel, config.rollout
    stage = math.lcm(max(1, parallel.tensor * parallel.context), max(1, parallel.expert * parallel.expert_tensor))
    return math.lcm(stage * max(1, parallel.pipeline), max(1, rollout.tensor * rollout.data))


def training_words(case: Case) -> str:
    """The training layout, as a person would say it."""
    train = case.train
    words = [f"tensor {train.tensor}", f"pipeline {train.pipeline}", f"data {train.data}"]
    chunks = [len(layers) for layers in train.chunk_layers(case.shape.layers)]
    if train.virtual > 1:
        words[1] += f" x {train.virtual} chunks"
    if train.context > 1:
        words.append(f"context {train.context}")
    if case.shape.experts:
        words.append(f"expert {train.expert}")
        if train.expert_tensor > 1:
            words.append(f"expert tensor {train.expert_tensor}")
        words.append(f"{case.shape.experts.count // train.expert} of {case.shape.experts.count} experts on a rank")
    if len(chunks) > 1:
        runs = Counter(chunks)
        layers = " or ".join(str(n) for n in sorted(runs))
        words.append(f"{layers} layers in a {'chunk' if train.virtual > 1 else 'stage'}")
    return ", ".join(words)


def rollout_words(case: Case) -> str:
    """The rollout layout, as a person would say it."""
    layout, experts = case.rollout, case.shape.experts
    if layout.data == 1:
        words = f"{count(layout.replicas, 'engine')} of {count(layout.tensor, 'rank')} (tensor {layout.tensor})"
    else:
        words = (
            f"{count(layout.world // layout.group, 'group')} of {layout.group} ranks "
            f"(tensor {layout.tensor} x data {layout.data})"
        )
    if experts is None:
        return words
    if layout.expert:
        return f"{words}, {experts.count // layout.group} of {experts.count} experts on a rank"
    return words + (", each expert cut over the ranks" if layout.group > 1 else "")


def cache_bytes(case: Case, weights: int, device: int | None) -> float | None:
    """Return the key-value cache of a rank, whose engine has so many bytes of weights; None: that is not known.

    `device`: bytes of one; None: not said.
    """
    rollout = case.config.rollout
    if rollout.cache_gib is not None:
        return rollout.cache_gib * GIB
    if device is None:
        return None
    room = max(0.0, cache_room(device, device, weights, rollout.memory_fraction, 1))
    return min(room, _need(case).useful_bytes) if rollout.memory_fraction is None else room


def cache_words(case: Case, weights: int, device: int | None) -> str:
    """Say what the key-value cache of a rank holds."""
    need, size = _need(case), cache_bytes(case, weights, device)
    if size is not None:
        return need.described(size).partition(": ")[2]
    wanted = f"{need.at_once} samples of {need.longest} tokens at once take"
    return f"{wanted} {need.useful_bytes / GIB:.2f} GiB a rank; --device-gib says how many fit beside the weights"


def _need(case: Case) -> CacheNeed:
    return CacheNeed.of(case.config, case.shape, case.world_size)


def count(number: int, what: str) -> str:
    """A number of things."""
    return f"{number} {what}{'' if number == 1 else 's'}"
