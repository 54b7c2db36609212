"""Define what the ranks answer to each verb, and how their answers become one; see distributed.protocol.Combined."""

from collections.abc import Mapping, Sequence
from operator import add
from typing import Any, Self, TypeVar

import msgspec

from spmd_rl.config.names import Verb
from spmd_rl.data.tickets import SampleReward, Ticket
from spmd_rl.distributed.protocol import Answer, Combined

Number = TypeVar("Number", int, float)
_NAMED = 4
"""Ranks that a message names, at most."""
SUSPECTS = 16
"""Samples of a skipped update that are kept, at most."""


class Refreshed(msgspec.Struct):
    """Answer `to_rollout`: bytes that came to a rank, of the rank with most."""

    network_bytes: int
    local_bytes: int

    def combine(self, other: Self) -> "Refreshed":
        return Refreshed(
            max(self.network_bytes, other.network_bytes),
            max(self.local_bytes, other.local_bytes),
        )


class Generated(msgspec.Struct):
    """Answer `generate`."""

    tickets: list[Ticket]
    """Of the samples that the rank holds."""
    most_seconds: float
    least_seconds: float
    """Of the rank that was busy longest, and shortest."""
    prompt_tokens: int
    cached_tokens: int
    """Tokens of prompts that the engine had computed before."""

    def combine(self, other: Self) -> "Generated":
        return Generated(
            self.tickets + other.tickets,
            max(self.most_seconds, other.most_seconds),
            min(self.least_seconds, other.least_seconds),
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
        )


class Graded(msgspec.Struct):
    """Answer `rewards`."""

    scored: list[SampleReward]
    busy_seconds: float
    """Of all graders together."""
    waited_seconds: float
    """Of the rank that waited longest."""
    responses: int = 0
    """Those that are new."""
    thinking: int = 0
    """Of these, those with a closed <think> block."""

    def combine(self, other: Self) -> "Graded":
        return Graded(
            self.scored + other.scored,
            self.busy_seconds + other.busy_seconds,
            max(self.waited_seconds, other.waited_seconds),
            self.responses + other.responses,
            self.thinking + other.thinking,
        )


class Exchanged(msgspec.Struct):
    """Answer `exchange`: bytes that a rank sent, of the rank with most, and tokens that all ranks laid down."""

    network_bytes: int
    tokens: int
    padding_tokens: int
    ranks: int = 1
    most_tokens: int = 0
    """Of the rank with most."""

    def __post_init__(self) -> None:
        self.most_tokens = max(self.tokens, self.most_tokens) if self.ranks == 1 else self.most_tokens

    def combine(self, other: Self) -> "Exchanged":
        return Exchanged(
            max(self.network_bytes, other.network_bytes),
            self.tokens + other.tokens,
            self.padding_tokens + other.padding_tokens,
            self.ranks + other.ranks,
            max(self.most_tokens, other.most_tokens),
        )


class Judged(msgspec.Struct):
    """Answer `judge`."""

    scores: list[tuple[int, float]]
    """(sample, score), from the ranks that report."""
    network_bytes: int
    seconds: dict[str, float]
    """Seconds that moving the model took: `onload`, `offload`; of the slowest rank."""

    def combine(self, other: Self) -> "Judged":
        return Judged(
            self.scores + other.scores,
            max(self.network_bytes, other.network_bytes),
            most(self.seconds, other.seconds),
        )


class Estimated(msgspec.Struct):
    """Answer `estimate_gae`."""

    told: list[dict[str, list[float]]]
    """Of each rank that reports, in the order of ranks: what algorithms.token_statistics.Spread.of takes, by name."""
    kl_seconds: float
    """Seconds that divergences took on the slowest rank."""

    def combine(self, other: Self) -> "Estimated":
        return Estimated(self.told + other.told, max(self.kl_seconds, other.kl_seconds))


class Learned(msgspec.Struct):
    """Answer `learn`: what one optimizer step came to."""

    updated: bool
    grad_norm: float
    """Both are the same on all ranks."""
    sums: list[dict[str, float]] = []
    """Over the loss tokens of each rank that reports, in the order of ranks; `tokens`: how many there are."""
    maxima: dict[str, float] = {}
    """The same, of the largest of a token."""
    losses_broken: list[str] = []
    """Without an update: the losses that are not finite, with their ranks, the first of them."""
    gradients_broken: list[str] = []
    """Without an update: the parameters whose gradient is not finite, with their ranks, the first of them."""
    beyond: str = ""
    """Without an update: the bound that it is beyond, the same on all ranks."""
    suspects: list[tuple[int, float]] = []
    """Without an update: the samples with the largest losses, and these; infinite where one is not finite."""
    moves: dict[str, float] = {}
    """Seconds that learners took to the device and from it before the step, as training.learner.take_turns says."""

    def combine(self, other: Self) -> "Learned":
        return Learned(
            self.updated,
            self.grad_norm,
            self.sums + other.sums,
            most(self.maxima, other.maxima),
            (self.losses_broken + other.losses_broken)[:_NAMED],
            (self.gradients_broken + other.gradients_broken)[:_NAMED],
            self.beyond,
            largest(self.suspects + other.suspects),
            most(self.moves, other.moves),
        )


class Costs(msgspec.Struct):
    """Answer `costs`."""

    peaks: dict[str, int]
    """Verb -> memory at its peak, of the hungriest rank; RESTING: what it held before its first verb."""
    holds: list[dict[str, int]]
    """worker.process_usage.ProcessUsage of each rank."""
    images: dict[str, int] = {}
    """Of all ranks together, since the last time: prompts whose images were decoded, and whose features were computed
    for training; nothing of a model of text."""
    image_seconds: float = 0.0
    """That a frozen vision tower took for them, on the rank where it took longest."""

    def combine(self, other: Self) -> "Costs":
        images = {name: count + other.images[name] for name, count in self.images.items()}
        seconds = max(self.image_seconds, other.image_seconds)
        return Costs(most(self.peaks, other.peaks), self.holds + other.holds, images, seconds)


class Progress(msgspec.Struct):
    """Answer `checkpoint_progress`."""

    written: bool
    """By all."""
    failed: str | None
    """Why, on the first rank on which it did."""
    asked: bool
    """Of any rank, to save and end."""

    def combine(self, other: Self) -> "Progress":
        return Progress(
            self.written and other.written,
            self.failed or other.failed,
            self.asked or other.asked,
        )


def largest(losses: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the few samples with the largest losses, the largest first; each once, at its largest."""
    found: dict[int, float] = {}
    for sample, size in losses:
        found[sample] = max(size, found.get(sample, 0.0))
    return sorted(found.items(), key=lambda one: (-one[1], one[0]))[:SUSPECTS]


def most(one: Mapping[str, Number], other: Mapping[str, Number]) -> dict[str, Number]:
    """Return the larger of two mappings' values, by name."""
    return {name: max(d[name] for d in (one, other) if name in d) for name in dict.fromkeys([*one, *other])}


def _first(one: Any, other: Any) -> Any:
    return one


def _joined(one: dict[str, list[int]], other: dict[str, list[int]]) -> dict[str, list[int]]:
    return one | other


def _all_digests(one: dict[str, str] | None, other: dict[str, str] | None) -> dict[str, str] | None:
    return None if one is None or other is None else one | other


_SILENT = (
    *(Verb.PUT, Verb.KEEP_REWARDS, Verb.WRITE_CONVERSATIONS, Verb.FORGET),
    *(Verb.EXPORT_HF, Verb.BEGIN_CHECKPOINT, Verb.LOAD, Verb.STOP),
)
"""They have no answer."""
_STRUCTS: Mapping[Verb, type[Answer]] = {
    Verb.TO_ROLLOUT: Refreshed,
    Verb.GENERATE: Generated,
    Verb.REWARDS: Graded,
    Verb.EXCHANGE: Exchanged,
    Verb.ESTIMATE_GAE: Estimated,
    Verb.JUDGE: Judged,
    Verb.LEARN: Learned,
    Verb.COSTS: Costs,
    Verb.CHECKPOINT_PROGRESS: Progress,
}
ANSWERS: Mapping[str, Combined] = {
    **dict.fromkeys(_SILENT, Combined(None, _first)),
    **{verb: Combined(struct, struct.combine) for verb, struct in _STRUCTS.items()},
    Verb.TO_TRAINING: Combined(float | None, _first),
    Verb.COMPARE_ANSWERS: Combined(list[tuple[int, bool]], add),
    Verb.READ: Combined(list[tuple[int, int, int]], add),
    Verb.WHITEN: Combined(list[list[float]], add),
    Verb.SCORE: Combined(dict[str, float], most),
    Verb.SAMPLE_KL: Combined(list[tuple[int, float]], add),
    Verb.CONVERSATIONS: Combined(list[dict[str, Any]], add),
    Verb.CHECKPOINT_BYTES: Combined(int, add),
    Verb.CHECKPOINT_FILES: Combined(dict[str, list[int]], _joined),
    Verb.CHECKPOINT_DIGESTS: Combined(dict[str, str] | None, _all_digests),
    Verb.COMPLETE_CHECKPOINT: Combined(list[str], add),
    Verb.REPLY: Combined(str, _first),
}
"""Of each verb."""
