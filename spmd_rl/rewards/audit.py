"""Score a run's stored samples again and show where the verdicts part.

python -m spmd_rl.rewards.audit runs/grpo                        the run's own rules, against the stored rewards
python -m spmd_rl.rewards.audit runs/grpo --rules acc 1          other rules, against the stored rewards
python -m spmd_rl.rewards.audit runs/grpo --rules acc 1 --against math_17k_acc 1    two sets of rules
"""

import argparse
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_rl.config.config import Config, ModelConfig
from spmd_rl.config.loading import load_config
from spmd_rl.data.tickets import SampleReward
from spmd_rl.distributed.terminal_lines import end_with_reader
from spmd_rl.errors import ConfigError
from spmd_rl.rewards.grade import CAUSES, RewardSample
from spmd_rl.rewards.grading.pool import GraderPool
from spmd_rl.rewards.reward_sample import of_record

_SAME = 1e-6
"""Rewards that differ by less agree: they were written as decimals."""


@dataclass(frozen=True)
class Stored:
    """A line of samples/*.jsonl, and where it stands."""

    place: str
    step: int
    sample: RewardSample
    scored: SampleReward


def main(arguments: list[str] | None = None) -> int:
    """Print the comparison; returns 0 when all verdicts agree, 1 when some don't, 2 for what can't be done."""
    parser = argparse.ArgumentParser(
        prog="python -m spmd_rl.rewards.audit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="directory of the run: runs/<name>")
    parser.add_argument("--rules", nargs="+", metavar="RULE WEIGHT", help="instead of the run's own")
    parser.add_argument("--against", nargs="+", metavar="RULE WEIGHT", help="instead of the stored rewards")
    parser.add_argument("--show", type=int, default=10, help="disagreements to print (10)")
    parser.add_argument("--output", type=Path, help="jsonl file for all disagreements")
    parser.add_argument("--workers", type=int, default=2, help="grading processes (2)")
    parser.add_argument("--timeout", type=float, help="seconds for a rule and a sample (the run's)")
    options = parser.parse_args(arguments)
    try:
        config, notes = _config(options.run, bool(options.rules))
        rules = _rules("--rules", options.rules) or config.reward.rules
        against = _rules("--against", options.against)
        stored, skipped = read_samples(options.run, config.rollout.max_response_length)
        timeout = config.reward.timeout_seconds if options.timeout is None else options.timeout
        reward = config.reward
        limits = (options.workers, timeout, reward.memory_mib, reward.batch, reward.first_call_seconds)
        new = score(stored, rules, *limits)
        old = score(stored, against, *limits) if against else [one.scored for one in stored]
    except ValueError as error:
        print(f"spmd_rl.rewards.audit: {error}", file=sys.stderr)
        return 2
    notes += [f"{count} lines left out: {why}" for why, count in skipped.items()]
    apart = [position for position in range(len(stored)) if differ(old[position], new[position])]
    names = (_spell(against) if against else "stored", _spell(rules))
    print("\n".join(report(options.run, stored, old, new, apart, names, options.show, notes)))
    if options.output:
        lines = [_line(stored[position], old[position], new[position]) for position in apart]
        options.output.write_text(
            "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8"
        )
    return 1 if apart else 0


def read_samples(run: Path, response_limit: int = 0) -> tuple[list[Stored], Counter]:
    """All stored samples of a run, in the order of its steps, and how many lines were left out, by reason.

    Raises a ValueError where there are none.
    """
    files = sorted((run / "samples").glob("*.jsonl"), key=lambda file: (_step(file), file.name))
    if not files:
        raise ValueError(f"{run}: there are no samples in {run / 'samples'}; name a run's directory, runs/<name>")
    stored, skipped = [], Counter()
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                stored.append(_stored(row, f"{file.name}:{number}", _step(file), response_limit))
            except json.JSONDecodeError:
                skipped["not JSON"] += 1
            except (KeyError, TypeError, AttributeError):
                skipped["without response, answer, reward and cause"] += 1
    if not stored:
        raise ValueError(f"{run}: none of the lines in {run / 'samples'} holds a sample ({dict(skipped)})")
    return stored, skipped


def score(
    stored: list[Stored],
    rules: dict[str, float],
    workers: int,
    timeout: float,
    memory_mib: int = 0,
    batch: int = 64,
    first_call_seconds: float = 0.0,
) -> list[SampleReward]:
    """The samples' scores by `rules`, in their order."""
    with GraderPool(rules, workers, timeout, memory_mib, batch, first_call_seconds) as pool:
        for position, one in enumerate(stored):
            pool.submit(position, one.sample)
        scored = {score.id: score for score in pool.collect(block=True)}
    return [scored[position] for position in range(len(stored))]


def differ(old: SampleReward, new: SampleReward) -> bool:
    """Another reward, or another verdict on the answer."""
    return abs(old.reward - new.reward) > _SAME or (old.cause == "correct") != (new.cause == "correct")


def report(
    run: Path,
    stored: list[Stored],
    old: list[SampleReward],
    new: list[SampleReward],
    apart: list[int],
    names: tuple[str, str],
    show: int,
    notes: list[str],
) -> list[str]:
    """Return what is printed: the table of causes, the means, and the first disagreements."""
    lines = [f"{run}: {len(stored)} samples of {len({one.step for one in stored})} steps", *notes]
    lines += [f"  old: {names[0]}", f"  new: {names[1]}", ""]
    lines += [f"{'':24}{'old':>10}{'new':>10}"]
    for word, values in (
        ("mean reward", [sum(s.reward for s in side) / len(side) for side in (old, new)]),
        ("correct", [sum(s.cause == "correct" for s in side) / len(side) for side in (old, new)]),
    ):
        lines.append(f"{word:24}{values[0]:>10.4f}{values[1]:>10.4f}")
    table = Counter((a.cause, b.cause) for a, b in zip(old, new, strict=True))
    seen = [cause for cause in CAUSES if any(cause in pair for pair in table)]
    lines += ["", "old \\ new".ljust(24) + "".join(cause.rjust(11) for cause in seen)]
    lines += [cause.ljust(24) + "".join(str(table[cause, other]).rjust(11) for other in seen) for cause in seen]
    lines += ["", f"{len(apart)} of {len(stored)} samples are judged differently"]
    for position in apart[:show]:
        line = _line(stored[position], old[position], new[position])
        lines += [
            "",
            f"{line['place']}  step {line['step']}",
            f"  answer    {_short(line['answer'])}",
            f"  response  ...{_short(line['response'][-160:])}",
            f"  old       {line['old']['reward']:g} {line['old']['cause']} {_short(line['old']['extracted'] or '')}",
            f"  new       {line['new']['reward']:g} {line['new']['cause']} {_short(line['new']['extracted'] or '')}",
        ]
    if len(apart) > show:
        lines += ["", f"{len(apart) - show} more; --show or --output gives them all"]
    return lines


def _stored(row: dict[str, Any], place: str, step: int, response_limit: int) -> Stored:
    sample = of_record(row, response_limit)
    scored = SampleReward(-1, float(row["reward"]), str(row["cause"]), row.get("scores") or {}, row.get("extracted"))
    sample.response.strip()
    return Stored(place, int(row.get("step", step)), sample, scored)


def _step(file: Path) -> int:
    number = re.search(r"[0-9]+", file.stem)
    return int(number[0]) if number else 0


def _config(run: Path, has_rules: bool) -> tuple[Config, list[str]]:
    file = run / "config.yaml"
    if not file.is_file():
        if not run.is_dir():
            raise ValueError(f"{run}: there is no such directory; name a run's directory, runs/<name>")
        if not has_rules:
            raise ValueError(f"{file}: there is no such file to read the run's rules from; give some with --rules")
        return Config(ModelConfig("")), []
    try:
        return load_config(["--config", str(file)]), []
    except ConfigError as error:
        if not has_rules:
            raise ValueError(f"{file} can't be read, so give the rules with --rules:\n{error}") from error
        return Config(ModelConfig("")), [f"{file} can't be read; limits are the defaults"]


def _rules(option: str, words: list[str] | None) -> dict[str, float] | None:
    if not words:
        return None
    try:
        return {name: float(weight) for name, weight in zip(words[::2], words[1::2], strict=True)}
    except ValueError as error:
        raise ValueError(
            f"{option} {' '.join(words)}: expected rules with a weight each, such as math_answer 1.0 format 0.1"
        ) from error


def _spell(rules: dict[str, float]) -> str:
    return " + ".join(f"{weight:g} {name}" for name, weight in rules.items())


def _line(stored: Stored, old: SampleReward, new: SampleReward) -> dict[str, Any]:
    sides = {
        side: {"reward": s.reward, "cause": s.cause, "extracted": s.extracted, "scores": s.scores}
        for side, s in (("old", old), ("new", new))
    }
    sample = stored.sample
    return {"place": stored.place, "step": stored.step, "answer": sample.answer, "response": sample.response} | sides


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 160 else text[:157] + "..."


if __name__ == "__main__":
    end_with_reader()
    sys.exit(main())
