"""A pool without grader processes, for runs in which reward models alone decide."""

from spmd_rl.data.tickets import SampleReward
from spmd_rl.rewards.grade import RewardSample


class NullPool:
    """A grader pool without rules: no sample is graded, so none has a score."""

    busy_seconds = 0.0
    graders: dict[int, int] = {}

    def submit(self, id: int, sample: RewardSample) -> None:
        pass

    def collect(self, block: bool) -> list[SampleReward]:
        return []

    def close(self) -> None:
        pass
