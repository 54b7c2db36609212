"""Say what cannot work among the places that a run is watched and profiled at."""

from spmd_rl.config.config import HangConfig, RunConfig
from spmd_rl.config.names import Phase, Verb
from spmd_rl.errors import Problem, did_you_mean


def hang_problems(hang: HangConfig) -> list[Problem]:
    """Return a problem for each deadline of what is no phase and no verb."""
    places = (*Phase, *Verb)
    return [
        Problem(
            f"hang.deadline_seconds {name}",
            None,
            "there is no such phase or verb",
            did_you_mean(name, places, f"a phase is one of {', '.join(Phase)}"),
        )
        for name in hang.deadline_seconds
        if name not in places
    ]


def profile_problems(run: RunConfig, world_size: int) -> list[Problem]:
    """Return a problem for each phase and rank to profile that there is not."""
    ranks = [rank for rank in run.profile.ranks if rank >= world_size]
    found = [
        Problem("run.profile.ranks", rank, f"there are {world_size} ranks", f"use 0 to {world_size - 1}")
        for rank in ranks
    ]
    phases = [str(phase) for phase in Phase]
    return found + [
        Problem("run.profile.phases", name, "there is no such phase", did_you_mean(name, phases, ", ".join(phases)))
        for name in run.profile.phases
        if name not in phases
    ]
