"""Who holds the device: the trainer or the engine, never both in full; and the refresh between them."""

from dataclasses import dataclass

from spmd_rl.distributed.layout import RolloutLayout, TrainLayout
from spmd_rl.distributed.world import World
from spmd_rl.rollout.engine import Engine
from spmd_rl.training.trainer import Trainer
from spmd_rl.weights.families import megatron_shard, vllm_shard
from spmd_rl.weights.move import Mover, Traffic
from spmd_rl.weights.plan import plan
from spmd_rl.weights.proof import prove_equal


@dataclass
class Residency:
    """The switch of one rank."""

    trainer: Trainer
    engine: Engine
    world: World
    train_layout: TrainLayout
    rollout_layout: RolloutLayout

    def __post_init__(self) -> None:
        shape, ranks = self.trainer.shape, range(self.world.size)
        self.sources = [megatron_shard(shape, self.train_layout, rank) for rank in ranks]
        self.destinations = [vllm_shard(shape, self.rollout_layout, rank) for rank in ranks]
        self.mover = Mover(plan(self.sources, self.destinations, self.world.rank, self.world.ranks_per_node))

    def to_rollout(self) -> Traffic:
        """Write the policy into the engine, prove that it arrived, and leave the device to the engine."""
        self.trainer.gradients.release()
        self.engine.wake_weights()
        written = self.engine.parameters()
        traffic = self.mover.run(self.trainer.parameters(), written)
        self.trainer.release()
        self.engine.wake_cache()
        return traffic

    def to_training(self) -> None:
        """Give the device back to the trainer; the engine's weights and cache are dropped."""
        self.engine.sleep()
        self.trainer.restore()
