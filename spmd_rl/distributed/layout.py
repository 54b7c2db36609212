"""Which rank holds which part: pure arithmetic between a rank and its coordinates."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrainCoords:
    """Where a rank stands in the training layout."""

    tensor: int
    data: int
    pipeline: int


@dataclass(frozen=True, slots=True)
class TrainLayout:
    """Sizes of the training parallelism; ranks in Megatron's default order tp-cp-ep-dp-pp (tensor fastest)."""

    tensor: int
    pipeline: int
    data: int

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "data"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel.{name} = {getattr(self, name)}: a parallel size is at least 1")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data

    def coords(self, rank: int) -> TrainCoords:
        """Coordinates of a rank."""
        assert 0 <= rank < self.world, f"rank {rank} of a world of {self.world}"
        rest, tensor = divmod(rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return TrainCoords(tensor, data, pipeline)

    def rank(self, tensor: int = 0, data: int = 0, pipeline: int = 0) -> int:
        """The rank at these coordinates."""
        return tensor + self.tensor * (data + self.data * pipeline)

    def tensor_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the other tensor slices of this rank's layers and batch, itself included."""
        at = self.coords(rank)
        return tuple(self.rank(t, at.data, at.pipeline) for t in range(self.tensor))

    def data_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same parameters, itself included."""
        at = self.coords(rank)
        return tuple(self.rank(at.tensor, d, at.pipeline) for d in range(self.data))

    def pipeline_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks that this rank's micro-batches pass through, first stage first."""
        at = self.coords(rank)
        return tuple(self.rank(at.tensor, at.data, p) for p in range(self.pipeline))


@dataclass(frozen=True, slots=True)
class RolloutLayout:
    """Inference engines over the same ranks: each `tensor` consecutive ranks are one replica."""

    tensor: int
    world: int

    def __post_init__(self) -> None:
        if self.tensor < 1 or self.world % self.tensor:
            raise ValueError(
                f"rollout.tensor = {self.tensor}: the {self.world} ranks don't divide into replicas of that size; "
                f"use a divisor of {self.world}"
            )

    @property
    def replicas(self) -> int:
        """Number of engines."""
        return self.world // self.tensor

    def tensor_rank(self, rank: int) -> int:
        """Index of a rank inside its replica."""
        return rank % self.tensor

    def replica(self, rank: int) -> int:
        """Index of the replica that a rank belongs to."""
        return rank // self.tensor

    def ranks(self, replica: int) -> tuple[int, ...]:
        """The ranks of a replica."""
        return tuple(range(replica * self.tensor, (replica + 1) * self.tensor))
