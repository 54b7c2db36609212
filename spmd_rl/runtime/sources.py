"""Know again what a run learns from: the prompts of its sources and the files of its rules."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from spmd_rl.config.resume_policy import is_among
from spmd_rl.data.digests import digest
from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.errors import Problem

_KNOBS = {"prompts": "data.source", "rule": "reward.rules"}


def sources(prompts: Sequence[Prompt], rules: Mapping[str, float]) -> dict[str, str]:
    """Return a description of each source of prompts and of each rule's file, with a digest of what it holds."""
    counts: dict[str, int] = {}
    digests: dict[str, hashlib.blake2b] = {}
    for prompt in prompts:
        counts[prompt.source] = counts.get(prompt.source, 0) + 1
        found = digests.setdefault(prompt.source, hashlib.blake2b(digest_size=16))
        found.update(f"{prompt.text}\0{prompt.answer}\1".encode("utf-8", "surrogatepass"))
    said = {f"prompts {name}": f"{counts[name]} prompts, digest {found.hexdigest()}" for name, found in digests.items()}
    for rule in rules:
        file, colon, _ = rule.partition(".py:")
        if colon and Path(f"{file}.py").is_file():
            said[f"rule {file}.py"] = f"digest {digest(Path(f'{file}.py'))}"
    return said


def changed_sources(
    before: Mapping[str, str], now: Mapping[str, str], settings: Sequence[str], allowed: Sequence[str]
) -> tuple[list[str], list[Problem]]:
    """Return what to say of sources that are others than the run had, and what keeps it from going on.

    `settings`: those that differ from before; they have said what follows from them. `allowed`:
    checkpoint.resume_allow.
    """
    notes, problems = [], []
    for name in sorted({*before, *now}):
        if not before or before.get(name) == now.get(name):
            continue
        kind, _, source = name.partition(" ")
        knob = _KNOBS[kind]
        had, has = before.get(name, "nothing of that name"), now.get(name, "nothing of that name")
        if is_among(knob, allowed) or any(one.partition(".")[0] == knob.partition(".")[0] for one in settings):
            notes.append(f"{knob}: {source} is not what the run had: {had} then, {has} now")
            continue
        way = f"bring back what was there, add {knob} to checkpoint.resume_allow, or begin anew with another run.name"
        problems.append(
            Problem(knob, source, f"it holds other things than when the run saved: {had} then, {has} now", way)
        )
    return notes, problems
