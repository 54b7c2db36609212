"""Profile verbs of a run: torch's profiler around those of the steps, ranks and phases that were asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spmd_rl.config.profile_config import ProfileConfig
from spmd_rl.distributed.status import current_status
from spmd_rl.platforms.platform import Platform

PROFILE = "profile"
"""The directory of traces in a run's directory."""


class Profiler:
    """Write a trace of each verb that is to be looked at: step_000003_update_learn_1_rank_00000.json.gz."""

    def __init__(self, settings: ProfileConfig, run_dir: Path, rank: int, platform: Platform):
        self.settings, self.directory, self.rank, self.platform = settings, run_dir / PROFILE, rank, platform
        self._written: dict[str, int] = {}

    def wants(self, step: int, phase: str) -> bool:
        """Return True for a verb of this step and phase, on this rank."""
        settings = self.settings
        ranks, phases = settings.ranks, settings.phases
        return step in settings.steps and (not ranks or self.rank in ranks) and (not phases or phase in phases)

    @contextmanager
    def verb(self, name: str) -> Iterator[None]:
        """Profile what is done inside, where that was asked for."""
        status = current_status()
        if not self.wants(status.step, str(status.phase)):
            yield
            return
        settings = self.settings
        detailed = settings.level != "operators"
        with self.platform.profiler(detailed, settings.level == "stacks", settings.memory) as profile:
            yield
        self.directory.mkdir(parents=True, exist_ok=True)
        begins = f"step_{status.step:06d}_{status.phase}_{name}".replace(" ", "_")
        self._written[begins] = number = self._written.get(begins, 0) + 1
        profile.export_chrome_trace(str(self.directory / f"{begins}_{number}_rank_{self.rank:05d}.json.gz"))
