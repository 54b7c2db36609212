"""Fault injection: `--inject kill:rank=1,phase=rollout,step=3`, read and checked.

    KIND:KEY=VALUE,KEY=VALUE,...          rank, phase, step, verb, doing: where; left out: anywhere, on every rank

docs/faults.md tells what each kind does, and what a run makes of it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from spmd_rl.config.config import Config
from spmd_rl.config.names import Phase, Verb
from spmd_rl.errors import ConfigError, Problem, did_you_mean, refuse

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
        """Return True where it may strike on this rank at this distributed.status.RankStatus."""
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
    ("nan", Phase.CRITIC_UPDATE): (Phase.CRITIC_UPDATE, Verb.LEARN),
}


_UPDATES = (Phase.UPDATE, Phase.CRITIC_UPDATE)


def read_fault(text: str) -> Fault:
    """Return a fault from its text. Raises ConfigError that says what is wrong with it."""
    kind, _, rest = text.partition(":")
    if kind not in _KINDS:
        raise _bad(text, f"there is no kind of fault {kind!r}", did_you_mean(kind, _KINDS))
    values = _read_values(text, kind, rest)
    if values.get("what") == REWARD:
        # Samples are graded while others are generated.
        if values.setdefault("phase", Phase.ROLLOUT) not in (Phase.ROLLOUT, Phase.EVALUATION):
            raise _bad(text, "nothing is graded then", "take rollout or evaluation", "phase", values["phase"])
        values.setdefault("verb", Verb.GENERATE)
    if kind in ("corrupt", "disk_full", "nan"):
        phase = values.get("phase", Phase.UPDATE) if kind == "nan" else ""
        if (kind, phase) not in _PLACES:
            places = ", ".join(phase for known, phase in _PLACES if known == kind)
            raise _bad(text, "nothing becomes nan there", f"it can be {places}", "phase", phase)
        if "of" in values and phase not in _UPDATES:
            raise _bad(text, f"it is in phase {' or '.join(_UPDATES)}", "leave one of them out", "of", values["of"])
        values["phase"], values["verb"] = _PLACES[kind, phase]
    return Fault(text, kind, **values)


def _read_values(text: str, kind: str, rest: str) -> dict[str, Any]:
    keys, needed = _KINDS[kind]
    values: dict[str, Any] = {}
    for number, word in enumerate(part.strip() for part in rest.split(",") if rest):
        key, given, value = word.partition("=")
        if number == 0 and word == REWARD and kind in ("kill", "stop", "slow"):
            values["what"] = REWARD
            continue
        if not given:
            raise _bad(text, f"{word!r} has no value", f"write KEY=VALUE, of {', '.join(keys)}")
        if key not in keys:
            raise _bad(text, f"{kind} has no {key!r}", did_you_mean(key, keys))
        if key in values:
            raise _bad(text, f"{key} is given twice", "leave one of them out")
        read, wanted = _VALUES[key]
        try:
            values[key] = read(value)
        except ValueError:
            if key == "phase":
                raise _bad(text, "there is no such phase", did_you_mean(value, Phase), key, value) from None
            raise _bad(text, "", f"it must be {wanted}", key, value) from None
    for key in needed:
        if key not in values:
            raise _bad(text, f"{key} is missing", f"it must be {_VALUES[key][1]}")
    return values


def _bad(text: str, met: str, way: str, key: str = "", value: str = "") -> ConfigError:
    return ConfigError(_problem(text, met, way, key, value))


def _problem(text: str, met: str, way: str, key: str = "", value: object = "") -> Problem:
    """Return the problem of a fault, or of one of its keys."""
    return Problem(key, value, met, way, f"inject = {text}") if key else Problem("inject", text, met, way)


def faults(config: Config) -> list[Fault]:
    """Return all faults to inject into a run; the settings are checked."""
    return [read_fault(text) for text in config.inject]


def fault_problems(config: Config, world_size: int) -> list[Problem]:
    """Return what is wrong with the faults of a run."""
    problems: list[Problem] = []
    for text in config.inject:
        try:
            problems += _misplaced(read_fault(text), config, world_size)
        except ConfigError as error:
            problems += error.problems
    return problems


def _misplaced(fault: Fault, config: Config, world_size: int) -> list[Problem]:
    """Return why a fault would never strike in this run."""
    last, dtype = config.train.steps, config.model.dtype
    bits = 32 if dtype == "float32" else 16
    found: list[Problem] = []

    def problem(met: str, way: str, key: str = "", value: object = "") -> None:
        found.append(_problem(fault.text, met, way, key, value))

    if fault.rank is not None and fault.rank >= world_size:
        problem(f"there are {world_size} ranks", f"it can be 0 to {world_size - 1}", "rank", fault.rank)
    if fault.step is not None and fault.step > last:
        problem(f"the run ends after train.steps = {last}", "name an earlier one", "step", fault.step)
    if fault.phase in (Phase.CRITIC_VALUES, Phase.CRITIC_UPDATE) and not config.algorithm.uses_critic:
        met = f"algorithm.advantage = {config.algorithm.advantage} has no critic"
        problem(met, "take another", "phase", fault.phase)
    if fault.rank and fault.phase == Phase.ADVANTAGE and not config.algorithm.uses_critic:
        problem("rank 0 alone is in phase adv", "take rank = 0", "rank", fault.rank)
    if fault.bit >= bits:
        problem(f"a {dtype} has bits 0 to {bits - 1}", "take one of these", "bit", fault.bit)
    if fault.what == REWARD and not config.reward.rules:
        problem("reward.rules is empty, so no process grades", "name a rule, or leave this out")
    if fault.phase == Phase.CHECKPOINT and not config.checkpoint.every_steps:
        problem("nothing is saved", "set checkpoint.every_steps, or leave this out")
    return found


def check_parameters(config: Config, names: Iterable[str]) -> None:
    """Raise ConfigError where a fault names a tensor that is not among the model's `names`."""
    known = list(names)
    refuse(
        [
            Problem(
                "inject",
                fault.text,
                f"the model has no tensor {fault.param!r}",
                did_you_mean(fault.param, known, most=4),
            )
            for fault in faults(config)
            if fault.param and fault.param not in known
        ]
    )
