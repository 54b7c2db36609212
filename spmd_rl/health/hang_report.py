"""Find whom the ranks of a hung run wait for and what is wrong there, and write the report. Pure: values, text."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from spmd_rl.distributed.rank_names import ranks_named
from spmd_rl.distributed.status import WAITS
from spmd_rl.health.heartbeat import Heartbeat
from spmd_rl.health.procfs import GONE, STOPPED

MOST_LINES = 16
"""Of the table; with more, places that differ in numbers only share a line."""
_BUSY = 0.5
"""A main thread that uses so much of the time runs; one that uses less waits."""
_GRADER = "reward "
"""Begins `doing` while a rank waits for its graders."""
_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True)
class RankState:
    """One rank at the moment when the run is found to hang."""

    beat: Heartbeat
    """Its last."""
    stalled_seconds: float
    silent_seconds: float = 0.0
    silent: bool = False
    """It sends no heartbeat."""
    state: str | None = None
    """Of its process, as a rank on the same machine sees it (procfs.state); None: nobody there could look."""
    neighbours: int = 0
    """Ranks on its machine that send heartbeats."""


@dataclass(frozen=True)
class Diagnosis:
    """The ranks to look at first, and why."""

    ranks: tuple[int, ...]
    """Empty: no rank is to blame."""
    reasons: list[str] = field(default_factory=list)


def diagnose(states: Sequence[RankState]) -> Diagnosis:
    """Find the ranks that the others wait for.

    First those that send no heartbeat; else those that neither wait at the control group nor in a collective; else
    those that wait elsewhere than most; else it is the network.
    """
    silent = [one for one in states if one.silent]
    if silent:
        return Diagnosis(_ranks(silent), _silent_reasons(silent))
    inside = [one for one in states if not one.beat.doing.startswith(WAITS)]
    working = [one for one in inside if not one.beat.waits]
    if working:
        return Diagnosis(_ranks(working), _grouped(working, _working_reason))
    places = defaultdict(list)
    for one in inside:
        places[one.beat.verb, _waits_at(one.beat)].append(one)
    if len(places) > 1:
        most = max(places.values(), key=len)
        # A tie says nothing: of two ranks that wait in two places, either may be the wrong one.
        odd = [one for group in places.values() if group is not most or 2 * len(group) <= len(inside) for one in group]
        where = _grouped(odd, lambda one: f"waits in {_waits_at(one.beat)}")
        return Diagnosis(_ranks(odd), [*where, "the ranks wait for each other in different exchanges: that never ends"])
    return Diagnosis((), _link_reasons(states, inside))


def _ranks(states: Iterable[RankState]) -> tuple[int, ...]:
    return tuple(sorted(one.beat.rank for one in states))


def _waits_at(beat: Heartbeat) -> str:
    """Name the innermost call outside of torch."""
    own = next((line for line in beat.stack if "/torch/" not in line), beat.stack[0] if beat.stack else "")
    return f"{beat.waits}, {own}"


def _grouped(states: Sequence[RankState], reason_of) -> list[str]:
    groups = defaultdict(list)
    for one in states:
        groups[reason_of(one)].append(one)
    return [f"{ranks_named(_ranks(group))} {words}" for words, group in groups.items()]


def _silent_reasons(silent: Sequence[RankState]) -> list[str]:
    words = []
    hosts = defaultdict(list)
    for one in silent:
        hosts[one.beat.machine].append(one)
    for group in hosts.values():
        if group[0].neighbours or any(one.state is not None for one in group):
            words += _grouped(group, _silent_reason)
            continue
        words.append(
            f"{ranks_named(_ranks(group))}: no rank on {group[0].beat.host} sends a heartbeat: the node or its link "
            "is gone, or all its ranks are stopped"
        )
    return words


def _silent_reason(one: RankState) -> str:
    if one.state in STOPPED:
        who = "a debugger" if one.state == "t" else "a signal"
        return f"is stopped by {who} (process state {one.state}): SIGCONT would let it go on"
    if one.state == GONE:
        return "is gone: there is no such process any more"
    if one.state == "D":
        return "waits in the kernel (process state D): a disk or a driver does not answer"
    if one.state == "R":
        return "runs (process state R) and lets no other thread of its Python work: it is inside a call of C code"
    if one.state is not None:
        return f"sleeps (process state {one.state}) inside a call that lets no other thread of its Python work"
    return "sends no heartbeat, and others on its node do: it is stopped or gone"


def _working_reason(one: RankState) -> str:
    beat = one.beat
    if beat.doing.startswith(_GRADER):
        return f"waits for a grader: {beat.doing}; the rule does not return"
    if beat.busy_seconds > _BUSY * max(beat.seconds, 1e-9):
        return "computes and makes no progress: an endless loop, or a very long computation"
    return "waits for something that is no rank: a file, a lock, a process, a sleep; see its stack"


def _link_reasons(states: Sequence[RankState], inside: Sequence[RankState]) -> list[str]:
    hosts = defaultdict(list)
    for one in states:
        hosts[one.beat.host].append(one.beat.rank)
    where = "; ".join(f"{host}: {ranks_named(ranks)}" for host, ranks in sorted(hosts.items()))
    waits = "between two verbs"
    if inside:
        waits = f"in the same exchange ({inside[0].beat.waits})"
    others = [one for one in states if one not in inside]
    missing = f", {ranks_named(_ranks(others))} at the control group" if inside and others else ""
    return [
        f"{ranks_named(_ranks(inside or states))} wait {waits}{missing}; all are alive and nobody is missing: "
        "messages do not arrive, so a link between them is dead",
        f"hosts: {where}",
    ]


def table(states: Sequence[RankState], culprits: Sequence[int]) -> list[str]:
    """Write one line for all ranks that are at the same; the culprits first."""
    groups: dict[tuple, list[RankState]] = defaultdict(list)
    for one in states:
        groups[_key(one, culprits, _words(one.beat))].append(one)
    if len(groups) > MOST_LINES:
        alike: dict[tuple, list[RankState]] = defaultdict(list)
        for one in states:
            alike[_key(one, culprits, _NUMBERS.sub("#", _words(one.beat)))].append(one)
        groups = alike
    lines = []
    ordered = sorted(groups.values(), key=lambda group: (group[0].beat.rank not in culprits, min(_ranks(group))))
    for group in ordered[: 2 * MOST_LINES]:
        first = group[0]
        texts = Counter(_words(one.beat) for one in group)
        words = texts.most_common(1)[0][0] + (" and the like" if len(texts) > 1 else "")
        seconds = sorted({round(one.stalled_seconds) for one in group})
        time = f"{seconds[0]} s" if len(seconds) == 1 else f"{seconds[0]} to {seconds[-1]} s"
        who = ranks_named(_ranks(group))
        if len(group) == 1:
            who += f" ({first.beat.host}, process {first.beat.process})"
        silent = f"; no heartbeat for {max(one.silent_seconds for one in group):.0f} s" if first.silent else ""
        mark = "   <- look here first" if first.beat.rank in culprits else ""
        waits = " waits in" if len(group) == 1 else " wait in"
        verb = waits if first.beat.waits and not first.beat.doing.startswith(WAITS) else " in"
        lines.append(f"{who}{verb} {words}, for {time}{silent}{mark}")
    if len(ordered) > 2 * MOST_LINES:
        rest = [one for group in ordered[2 * MOST_LINES :] for one in group]
        lines.append(f"{ranks_named(_ranks(rest))}: elsewhere, see places.json")
    return lines


def _key(one: RankState, culprits: Sequence[int], words: str) -> tuple:
    return words, one.silent, one.beat.rank in culprits, bool(one.beat.waits)


def _words(beat: Heartbeat) -> str:
    """step 7, rollout (generate): request 17; 30 of 64 finished."""
    at = f"step {beat.step}, {beat.phase}" if beat.step else beat.phase
    if beat.verb and beat.verb != beat.phase:
        at += f" ({beat.verb})"
    if beat.doing:
        at += f": {beat.doing}"
    return f"{at} [{beat.waits}]" if beat.waits and not beat.doing.startswith(WAITS) else at


def report(
    headline: str, states: Sequence[RankState], diagnosis: Diagnosis, stacks: dict[int, str], directory: str, end: str
) -> str:
    """Write all that a person reads. `stacks`: of ranks that could be asked now, else those of their last beat."""
    lines = [f"hang: {headline}", ""]
    lines += [f"  {line}" for line in table(states, diagnosis.ranks)]
    lines += ["", *diagnosis.reasons]
    by_rank = {one.beat.rank: one for one in states}
    shown = diagnosis.ranks[:1] or tuple(_ranks(states)[:1])
    for rank in shown:
        one = by_rank[rank]
        old = f" {one.silent_seconds:.0f} s ago, with its last heartbeat" if one.silent else ""
        if one.beat.stack:
            lines += ["", f"the main thread of rank {rank}{old}:", *(f"  {line}" for line in one.beat.stack[:8])]
        if one.silent and stacks.get(rank):
            lines += ["", "and now, as its own signal handler wrote it:", *_brief(stacks[rank])]
    lines += ["", f"stacks of all threads of all ranks: {directory}", end]
    return "\n".join(lines)


def _brief(dump: str) -> list[str]:
    """Return the main thread's part of what faulthandler wrote: it comes last, or is marked as the current one."""
    parts = dump.strip().split("\n\n")
    chosen = next((part for part in parts if part.startswith("Current thread")), parts[-1])
    return [f"  {line.strip()}" for line in chosen.splitlines()[:9]]
