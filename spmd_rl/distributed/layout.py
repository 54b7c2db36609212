"""Which rank holds which part: pure arithmetic between a rank and its coordinates."""

from dataclasses import dataclass, replace
from typing import Self

from spmd_rl.config.config import ParallelConfig
from spmd_rl.config.rollout_config import RolloutConfig


@dataclass(frozen=True, slots=True)
class TrainCoords:
    """A rank's coordinates in the training layout."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    expert_tensor: int


@dataclass(frozen=True, slots=True)
class TrainLayout:
    """Sizes of the training parallelism; ranks in Megatron's default order tp-cp-ep-dp-pp (tensor fastest).

    `data`: replicas that see different samples. `expert`: ranks that share the experts of a layer, `expert_tensor`:
    ranks that share one expert; both inside a pipeline stage, over the same ranks as tensor x context x data.
    `virtual`: model chunks of each pipeline stage (Megatron's virtual pipeline). `layers_per_stage`: layers of each
    chunk in the model's order (chunk c is the (c // pipeline)-th of stage c % pipeline); empty: equally many.
    """

    tensor: int
    pipeline: int
    data: int
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual: int = 1
    layers_per_stage: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data", "context", "expert", "expert_tensor", "virtual"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel.{name} = {getattr(self, name)}: a parallel size is at least 1")
        if self.stage_ranks % (self.expert * self.expert_tensor):
            raise ValueError(
                f"parallel.expert x parallel.expert_tensor = {self.expert} x {self.expert_tensor}: does not divide the "
                f"{self.stage_ranks} ranks of a pipeline stage (tensor x context x data = {self.tensor} x "
                f"{self.context} x {self.data})"
            )
        if self.layers_per_stage and len(self.layers_per_stage) != self.pipeline * self.virtual:
            raise ValueError(
                f"parallel.layers_per_stage = {list(self.layers_per_stage)}: it has {len(self.layers_per_stage)} "
                f"entries, pipeline x virtual = {self.pipeline} x {self.virtual} wants {self.pipeline * self.virtual}"
            )

    @classmethod
    def of(cls, parallel: ParallelConfig, world: int) -> Self:
        """The layout that a configuration means on so many ranks. Raises ValueError when it can't be."""
        return cls(
            parallel.tensor,
            parallel.pipeline,
            parallel.data(world),
            parallel.context,
            expert=parallel.expert,
            expert_tensor=parallel.expert_tensor,
            virtual=parallel.virtual,
            layers_per_stage=tuple(parallel.layers_per_stage),
        )

    def suited_to(self, layers: int) -> Self:
        """The same ranks for a model of another depth, its layers dealt out as evenly as they can be."""
        chunks = self.pipeline * self.virtual
        if sum(self.layers_per_stage) == layers:
            return self
        if layers % chunks == 0 or layers < chunks:
            return replace(self, layers_per_stage=())
        counts = [layers // chunks + (chunk >= chunks - layers % chunks) for chunk in range(chunks)]
        return replace(self, layers_per_stage=tuple(counts))

    @property
    def stage_ranks(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.stage_ranks * self.pipeline

    def coords(self, rank: int) -> TrainCoords:
        """Coordinates of a rank."""
        assert 0 <= rank < self.world, f"rank {rank} of a world of {self.world}"
        pipeline, in_stage = divmod(rank, self.stage_ranks)
        rest, tensor = divmod(in_stage, self.tensor)
        data, context = divmod(rest, self.context)
        rest, expert_tensor = divmod(in_stage, self.expert_tensor)
        return TrainCoords(tensor, context, data, pipeline, rest % self.expert, expert_tensor)

    def rank(self, tensor: int = 0, data: int = 0, pipeline: int = 0, context: int = 0) -> int:
        """The rank at these coordinates."""
        return tensor + self.tensor * (context + self.context * (data + self.data * pipeline))

    def tensor_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the other tensor slices of this rank's layers and batch, itself included."""
        at = self.coords(rank)
        return tuple(self.rank(t, at.data, at.pipeline, at.context) for t in range(self.tensor))

    def pipeline_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that this rank's micro-batches pass through, first stage first."""
        at = self.coords(rank)
        return tuple(self.rank(at.tensor, at.data, p, at.context) for p in range(self.pipeline))

    def chunk_layers(self, layers: int) -> tuple[range, ...]:
        """The layers of each model chunk, in the model's order. Raises ValueError when they don't fit the layout."""
        chunks = self.pipeline * self.virtual
        counts = self.layers_per_stage or (layers // chunks,) * chunks
        if sum(counts) != layers or min(counts) < 1:
            even = [layers // chunks + (chunk >= chunks - layers % chunks) for chunk in range(chunks)]
            if self.layers_per_stage:
                what = (
                    f"parallel.layers_per_stage = {list(counts)}: it names {sum(counts)} layers, the model has {layers}"
                )
            else:
                knob = f"parallel.pipeline = {self.pipeline}"
                if self.virtual > 1:
                    knob = f"parallel.pipeline x parallel.virtual = {self.pipeline} x {self.virtual}"
                what = f"{knob}: the model's {layers} layers don't divide by it"
            way = f"; parallel.layers_per_stage: {even} would do" if layers >= chunks else "; use fewer stages"
            raise ValueError(what + way)
        starts = [sum(counts[:chunk]) for chunk in range(chunks)]
        return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


@dataclass(frozen=True, slots=True)
class RolloutLayout:
    """Inference engines over the same ranks: each `tensor` x `data` consecutive ranks are one group.

    `data`: replicas of the attention inside a group, each with requests of its own, that run in step because they
    share the experts. `expert`: the experts are spread whole over all ranks of a group; else each is cut over them.
    """

    tensor: int
    world: int
    data: int = 1
    expert: bool = False

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.data < 1 or self.world % self.group:
            knob = f"rollout.tensor = {self.tensor}" + (f" x rollout.data = {self.data}" if self.data != 1 else "")
            raise ValueError(
                f"{knob}: the {self.world} ranks don't divide into groups of that size; use a divisor of {self.world}"
            )

    @classmethod
    def of(cls, rollout: RolloutConfig, world: int) -> Self:
        """The layout that a configuration means on so many ranks. Raises ValueError when it can't be."""
        return cls(rollout.tensor, world, rollout.data, rollout.expert_parallel)

    @property
    def group(self) -> int:
        """Number of ranks that share the experts."""
        return self.tensor * self.data

    @property
    def replicas(self) -> int:
        """Number of engines that take requests of their own."""
        return self.world // self.tensor

    def tensor_rank(self, rank: int) -> int:
        """Index of a rank inside its replica."""
        return rank % self.tensor

    def group_rank(self, rank: int) -> int:
        """Index of a rank among those that share the experts."""
        return rank % self.group

    def replica(self, rank: int) -> int:
        """Index of the replica that a rank belongs to."""
        return rank // self.tensor

    def ranks(self, replica: int) -> tuple[int, ...]:
        """The ranks of a replica."""
        return tuple(range(replica * self.tensor, (replica + 1) * self.tensor))
