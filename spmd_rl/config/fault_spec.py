"""Faults that a run is asked to suffer: `--inject kill:rank=1,phase=rollout,step=3`, read and checked.

    KIND:KEY=VALUE,KEY=VALUE,...          rank, phase, step, verb, doing: where; left out: anywhere, on every rank

docs/faults.md tells what each kind does, and what a run makes of it.
"""

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from spmd_rl.config.config import Config
from spmd_rl.config.names import Phase, Verb
from spmd_rl.errors import ConfigError

REWARD = "reward"
"""In place of a rank's process, those that grade its samples: `slow:reward,seconds=30`."""


@dataclass(frozen=True)
class Fault:
    """One of them. What is empty or None was left out."""

    text: str
    """As the user wrote it."""
    kind: str
    what: str = ""
    """REWARD, or the rank itself."""
    rank: int | None = None
    step: int | None = None
    phase: str = ""
    verb: str = ""
    doing: str = ""
    """Part of what the rank says that it is doing."""
    after: float = 0.0
    """Seconds from there."""
    seconds: float = 0.0
    error: str = ""
    param: str = ""
    """A tensor's name in the Hugging Face directory."""
    bit: int = 0
    """0 is the lowest of the mantissa, the highest the sign."""
    side: str = "rollout"
    of: str = ""

    def fits(self, rank: int, place: Any) -> bool:
        """Whether it may strike on this rank at this distributed.status.RankStatus."""
        return (
            self.rank in (None, rank)
            and self.step in (None, place.step)
            and self.phase in ("", place.phase)
            and self.verb in ("", place.verb)
            and self.doing in place.doing
        )


def _whole(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def _above_0(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return read


# Of each key, how its value is read and what it must be.
_VALUES: dict[str, tuple[Callable[[str], Any], str]] = {
    "rank": (_whole, "a rank, counted from 0"),
    "step": (_whole, "a step, counted from 1 (0: before the first)"),
    "phase": (_one_of(*Phase), "a phase"),
    "verb": (str, "a verb"),
    "doing": (str, "text"),
    "after": (_above_0, "seconds above 0"),
    "seconds": (_above_0, "seconds above 0"),
    "error": (str, "text"),
    "param": (str, "a tensor of the model"),
    "bit": (_whole, "a bit, counted from 0"),
    "side": (_one_of("training", "rollout"), "training or rollout"),
    "of": (_one_of("gradient", "loss"), "gradient or loss"),
}
_WHERE = ("rank", "phase", "step", "verb", "doing", "after")
# Of each kind its keys, those that must be there behind the bar.
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "kill": (_WHERE, ()),
    "stop": (_WHERE, ()),
    "loop": (_WHERE, ()),
    "slow": ((*_WHERE, "seconds"), ("seconds",)),
    "raise": ((*_WHERE, "error"), ()),
    "corrupt": (("param", "bit", "side", "rank", "step"), ("param", "bit")),
    "nan": (("rank", "phase", "step", "of"), ()),
    "disk_full": (("rank", "step"), ()),
}
# These strike where what they break is in use.
_PLACES = {
    ("corrupt", ""): (Phase.TO_ROLLOUT, Verb.TO_ROLLOUT),
    ("disk_full", ""): (Phase.CHECKPOINT, Verb.BEGIN_CHECKPOINT),
    ("nan", Phase.UPDATE): (Phase.UPDATE, Verb.LEARN),
    ("nan", Phase.ROLLOUT): (Phase.ROLLOUT, Verb.GENERATE),
    ("nan", Phase.CHECKPOINT): (Phase.CHECKPOINT, Verb.BEGIN_CHECKPOINT),
}


def read_fault(text: str) -> Fault:
    """A fault from its text. Raises ValueError that says what is wrong with it."""
    knob = f"inject = {text}"
    kind, _, rest = text.partition(":")
    if kind not in _KINDS:
        raise ValueError(f"{knob}: there is no kind of fault {kind!r}; {_nearest(kind, _KINDS)}")
    keys, needed = _KINDS[kind]
    values: dict[str, Any] = {}
    for number, word in enumerate(part.strip() for part in rest.split(",") if rest):
        key, given, value = word.partition("=")
        if number == 0 and word == REWARD and kind in ("kill", "stop", "slow"):
            values["what"] = REWARD
            continue
        if not given:
            raise ValueError(f"{knob}: {word!r} has no value; write KEY=VALUE, of {', '.join(keys)}")
        if key not in keys:
            raise ValueError(f"{knob}: {kind} has no {key!r}; {_nearest(key, keys)}")
        if key in values:
            raise ValueError(f"{knob}: {key} is given twice; leave one of them out")
        read, wanted = _VALUES[key]
        try:
            values[key] = read(value)
        except ValueError:
            words = f"there is no such phase; {_nearest(value, Phase)}" if key == "phase" else f"it must be {wanted}"
            raise ValueError(f"{knob}: {key} = {value}: {words}") from None
    for key in needed:
        if key not in values:
            raise ValueError(f"{knob}: {key} is missing; it must be {_VALUES[key][1]}")
    if values.get("what") == REWARD:
        # Samples are graded while others are generated.
        if values.setdefault("phase", Phase.ROLLOUT) not in (Phase.ROLLOUT, Phase.EVALUATION):
            raise ValueError(f"{knob}: phase = {values['phase']}: nothing is graded then; take rollout or evaluation")
        values.setdefault("verb", Verb.GENERATE)
    if kind in ("corrupt", "disk_full", "nan"):
        phase = values.get("phase", Phase.UPDATE) if kind == "nan" else ""
        if (kind, phase) not in _PLACES:
            places = ", ".join(phase for known, phase in _PLACES if known == kind)
            raise ValueError(f"{knob}: phase = {phase}: nothing becomes nan there; it can be {places}")
        if "of" in values and phase != Phase.UPDATE:
            raise ValueError(f"{knob}: of = {values['of']}: it is in phase update; leave one of them out")
        values["phase"], values["verb"] = _PLACES[kind, phase]
    return Fault(text, kind, **values)


def faults(config: Config) -> list[Fault]:
    """All that a run is asked to suffer; the settings are checked."""
    return [read_fault(text) for text in config.inject]


def fault_problems(config: Config, world_size: int) -> list[str]:
    """What is wrong with the faults of a run, one a line."""
    problems = []
    for text in config.inject:
        try:
            fault = read_fault(text)
        except ValueError as error:
            problems.append(str(error))
            continue
        knob = f"inject = {text}"
        bits = 32 if config.model.dtype == "float32" else 16
        if fault.rank is not None and fault.rank >= world_size:
            problems.append(f"{knob}: rank = {fault.rank}: there are {world_size} ranks, 0 to {world_size - 1}")
        if fault.step is not None and fault.step > config.train.steps:
            problems.append(f"{knob}: step = {fault.step}: the run ends after train.steps = {config.train.steps}")
        if fault.rank and fault.phase == Phase.ADVANTAGE:
            problems.append(f"{knob}: rank = {fault.rank}: rank 0 alone is in phase adv; take rank = 0")
        if fault.bit >= bits:
            problems.append(f"{knob}: bit = {fault.bit}: a {config.model.dtype} has bits 0 to {bits - 1}")
        if fault.what == REWARD and not config.reward.rules:
            problems.append(f"{knob}: reward.rules is empty, so no process grades; name a rule, or leave this out")
        if fault.phase == Phase.CHECKPOINT and not config.checkpoint.every_steps:
            problems.append(f"{knob}: nothing is saved; set checkpoint.every_steps, or leave this out")
    return problems


def check_parameters(config: Config, names: Iterable[str]) -> None:
    """Raises ConfigError where a fault names a tensor that is not among the model's `names`."""
    known = list(names)
    problems = [
        f"inject = {fault.text}: the model has no tensor {fault.param!r}; {_nearest(fault.param, known, most=4)}"
        for fault in faults(config)
        if fault.param and fault.param not in known
    ]
    if problems:
        raise ConfigError(problems)


def _nearest(word: str, known: Iterable[str], most: int = 20) -> str:
    known = list(known)
    near: Sequence[str] = difflib.get_close_matches(word, known, 1)
    some = ", ".join(known[:most]) + (", ..." if len(known) > most else "")
    return f"did you mean {near[0]}?" if near else f"there are {some}"
