"""Know again what a run learns from: the prompts of its sources and the files of its rules."""

import hashlib
import json
import re
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from spmd_rl.config.resume_policy import is_among
from spmd_rl.data.digests import digest
from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.errors import Problem

_KNOBS = {
    "prompts": "data.source",
    "columns": "data.source",
    "tokens": "data.template",
    "pictures": "data.image_column",
    "rule": "reward.rules",
}
_SAYS = {
    "columns": "the columns that rules are given",
    "tokens": "the token ids of its prompts",
    "pictures": "the pictures that its prompts show",
}


def sources(prompts: Sequence[Prompt], rules: Mapping[str, float]) -> dict[str, str]:
    """Return a description of each source of prompts and of each rule's file, with a digest of what it holds.

    Of a source: its questions and answers, the columns that rules are given, the token ids, and the pictures.
    """
    counts: Counter[str] = Counter()
    digests: dict[tuple[str, str], hashlib.blake2b] = {}
    for prompt in prompts:
        counts[prompt.source] += 1
        for kind, held in (
            ("prompts", f"{prompt.text}\0{prompt.answer}\1".encode("utf-8", "surrogatepass")),
            ("columns", json.dumps(prompt.row, sort_keys=True, default=str).encode()),
            ("pictures", prompt.pictures_digest.encode()),
            ("tokens", array("q", (len(prompt.token_ids), *prompt.token_ids)).tobytes()),
        ):
            if held:
                digests.setdefault((kind, prompt.source), hashlib.blake2b(digest_size=16)).update(held)
    said = {
        f"{kind} {name}": f"{counts[name]} prompts, digest {found.hexdigest()}"
        for (kind, name), found in digests.items()
    }
    for rule in rules:
        path = re.sub(r"^\w+:(?=.+:)", "", rule.partition("(")[0])  # trl:file.py:function
        source, colon, _ = path.rpartition(":")
        if colon and (file := _file_of(source)):
            said[f"rule {source}"] = f"digest {digest(file)}"
    return said


def _file_of(source: str) -> Path | None:
    """Return the file of a user's rule, which file.py or package.module names; nothing is imported."""
    if source.endswith(".py"):
        return Path(source) if Path(source).is_file() else None
    path, spec = None, None
    for depth in range(1, source.count(".") + 2):
        spec = PathFinder.find_spec(".".join(source.split(".")[:depth]), path)
        path = spec.submodule_search_locations if spec is not None else []
    return Path(spec.origin) if spec is not None and spec.origin and Path(spec.origin).is_file() else None


def changed_sources(
    before: Mapping[str, str], now: Mapping[str, str], settings: Sequence[str], allowed: Sequence[str]
) -> tuple[list[str], list[Problem]]:
    """Return what to say of sources that are others than the run had, and what keeps it from going on.

    `settings`: those that differ from before; they have said what follows from them. `allowed`:
    checkpoint.resume_allow. Nothing is said of what a checkpoint describes of no source, nor of another choice of
    rules, which is a setting.
    """
    notes, problems, told = [], [], set()
    known = {name.partition(" ")[0] for name in before}
    for name in sorted({*before, *now}, key=lambda name: (list(_KNOBS).index(name.partition(" ")[0]), name)):
        kind, _, source = name.partition(" ")
        knob = _KNOBS[kind]
        had, has = before.get(name, "nothing of that name"), now.get(name, "nothing of that name")
        if kind not in known or had == has or (kind != "prompts" and source in told):
            continue
        if kind == "rule" and not (name in before and name in now):
            continue
        told.add(source)  # other prompts have other token ids
        what = f"{source}, {_SAYS[kind]}" if kind in _SAYS else source
        if is_among(knob, allowed) or any(one.partition(".")[0] == knob.partition(".")[0] for one in settings):
            notes.append(f"{knob}: {what}: not what the run had: {had} then, {has} now")
            continue
        way = f"bring back what was there, add {knob} to checkpoint.resume_allow, or begin anew with another run.name"
        met = f"it holds other things than when the run saved: {had} then, {has} now"
        problems.append(Problem(knob, what, met, way))
    return notes, problems
