"""Whether a run may go on with other settings than it began with."""

from collections.abc import Mapping, Sequence
from typing import Any

# Where, how fast and how watched a run goes does not change what it computes (beyond rounding).
ALWAYS = (
    "run.",
    "checkpoint.",
    "hang.",
    "parallel.",
    "evaluation.",
    "rollout.tensor",
    "rollout.data",
    "rollout.expert_parallel",
    "rollout.max_sequences",
    "rollout.cache_gib",
    "rollout.block_tokens",
    "rollout.refresh_bucket_mib",
    "rollout.canary_",
    "reward.workers",
    "reward.timeout_seconds",
    "reward.memory_mib",
    "train.tokens_per_microbatch",
    "train.logprob_chunk_tokens",
    "train.share_prompts",
    "train.recompute",
    "train.max_skipped",
    "inject",
)
_NEVER = ("run.seed",)


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Dotted name, value before, value now, of the settings that differ; a setting that is not there is None."""
    names = dict.fromkeys((*before, *now))
    return [(name, before.get(name), now.get(name)) for name in names if before.get(name) != now.get(name)]


def may_differ(name: str, allowed: Sequence[str]) -> bool:
    """Whether a setting is among these names or a part of one, or begins as one that ends in a dot or an underscore."""
    return any(name == a or name.startswith(a if a.endswith((".", "_")) else f"{a}.") for a in allowed)


def refused(before: Mapping[str, Any], now: Mapping[str, Any], allowed: Sequence[str]) -> list[str]:
    """What keeps a run with settings `now` from going on with the state of one with settings `before`, one a line.

    `allowed`: names, or beginnings of names that end in a dot, that may differ beside those that always may.
    """
    found = []
    for name, old, new in changes(before, now):
        # More steps are the same run, longer, as long as the learning rate does not depend on where it ends.
        longer = name == "train.steps" and now.get("train.schedule") == "constant"
        may = may_differ(name, (*ALWAYS, *allowed))
        if (may and name not in _NEVER) or name in allowed or longer:
            continue
        found.append(
            f"{name} = {new}: the run to go on with had {old}; set it back, add it to checkpoint.resume_allow, or "
            "begin anew with checkpoint.resume = never"
        )
    return found
