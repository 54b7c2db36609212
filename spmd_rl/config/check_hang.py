"""Say what cannot work among the deadlines that a run is watched with."""

from spmd_rl.config.config import HangConfig
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
