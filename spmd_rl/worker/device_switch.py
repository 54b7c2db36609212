"""Switch the device between the learners and the engine, which never hold it both in full; and refresh the engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from spmd_rl.data.answers import Refreshed
from spmd_rl.distributed.layout import RolloutLayout
from spmd_rl.distributed.status import doing
from spmd_rl.distributed.verb import verb
from spmd_rl.distributed.world import World
from spmd_rl.platforms.platform import Platform
from spmd_rl.rollout.engine import Engine
from spmd_rl.training.learner import take_turns
from spmd_rl.training.vision import is_frozen
from spmd_rl.weights.families import megatron_shard, vllm_shard
from spmd_rl.weights.transfer.boxes import Shard, common_boxes
from spmd_rl.weights.transfer.checksum import Checksums, verify
from spmd_rl.weights.transfer.transfer_schedule import Schedule, bucket_of_bytes
from spmd_rl.weights.transfer.weight_transfer import WeightTransfer
from spmd_rl.worker.consistency_check import ConsistencyCheck
from spmd_rl.worker.trainer import Trainer


@dataclass
class DeviceSwitch:
    """The switch of one rank."""

    trainer: Trainer
    engine: Engine
    world: World
    rollout_layout: RolloutLayout
    bucket_bytes: int
    platform: Platform

    consistency: ConsistencyCheck | None = None

    def __post_init__(self) -> None:
        self.policy = self.trainer.models["policy"]
        shape, rank, ranks = self.policy.shape, self.world.rank, range(self.world.size)
        self.sources = sources = [megatron_shard(shape, self.trainer.layout, other) for other in ranks]
        self.destinations = destinations = [vllm_shard(shape, self.rollout_layout, other) for other in ranks]
        self.mover = self._mover(destinations)
        self.destination = destinations[rank]
        self.engine.weights.kept = frozenset(self._frozen(self.destination))
        if self.engine.features is not None:
            self.engine.features.keep = {"vision", "projector"} <= set(self.trainer.config.model.freeze)
        boxes = common_boxes([*sources, *destinations])
        self.trained = Checksums(sources[rank], boxes, "training")
        self.rolled_out = Checksums(destinations[rank], boxes, "rollout")
        self.refreshes = 0
        self.on_written: Callable[[str, torch.Tensor], None] = lambda name, tensor: None
        """Sees each of the engine's parameters when a refresh has written it, before it is proved."""

    @verb
    def to_rollout(self, canary: bool = False) -> Refreshed:
        """Write the policy into the engine, prove that it arrived, and leave the device to the engine.

        `canary`: let the engine make the few tokens that both will have scored when the device comes back.
        Raises RuntimeError that names tensor, slice, parameter and rank where the engine holds something else.
        """
        take_turns(self.trainer.learners, "policy")
        self.trainer.learners["policy"].release()
        self._hand_over(training=False)
        self.engine.wake_weights()
        policy, engine = self.policy.merged_weights(), self.engine.weights
        # The first refresh is checked to the last element, later ones in turns.
        turn = self.refreshes if self.refreshes else None
        self.refreshes += 1
        for side in (self.trained, self.rolled_out):
            side.forget(turn)

        def written(name: str) -> None:
            self.on_written(name, engine[name])
            self.rolled_out.update(name, engine[name])
            engine.written(name)

        held = engine.held
        if held and self.mover.plan.destination is self.destination:
            shards = {id(shard): shard.without(self._frozen(shard)) for shard in self.destinations}
            self.mover = self._mover([shards[id(shard)] for shard in self.destinations])
        traffic = self.mover.run(policy, engine, written)
        with doing("compares checksums"):
            for name in held:
                self.on_written(name, engine[name])
                self.rolled_out.update(name, engine[name])
            self.trained.update_all(policy)
            verify([self.trained, self.rolled_out], self.world.size, self.world.payload)
        engine.end()
        for learner in self.trainer.learners.values():
            learner.offload()
        # The engine asks the driver for what the cache takes: torch's allocator must not keep it.
        self.platform.give_back_memory()
        self.engine.wake_cache()
        if canary and self.consistency is not None:
            self.consistency.generate()
        return Refreshed(traffic.network_bytes, traffic.local_bytes)

    def _mover(self, destinations: Sequence[Shard]) -> WeightTransfer:
        bucket, rank = bucket_of_bytes(self.bucket_bytes, self.policy.dtype.itemsize), self.world.rank
        plan = Schedule(self.sources, destinations, self.world.ranks_per_node, bucket).plan(rank)
        return WeightTransfer(plan, self.sources[rank], control=self.world.payload, sources=self.sources)

    def _frozen(self, shard: Shard) -> list[str]:
        """Return the parameters that training leaves as they are: one refresh writes them for the whole run."""
        shape, frozen = self.policy.shape, self.trainer.config.model.freeze
        return [
            name
            for name, pieces in shard.by_param.items()
            if pieces and all(is_frozen(shape, piece.tensor, frozen) for piece in pieces)
        ]

    @verb
    def to_training(self) -> float | None:
        """Give the device back to the trainer; the engine's weights and cache are dropped.

        Returns the gap between both engines' log-probabilities of the canary, where one was made.
        """
        self.engine.sleep()
        self._hand_over(training=True)
        take_turns(self.trainer.learners, "policy")
        return self.consistency.compare() if self.consistency is not None else None

    def _hand_over(self, training: bool) -> None:
        """Give the driver back what torch's allocator keeps, for who has the device next."""
        self.platform.give_back_memory()
        self.platform.expandable_segments(training)
