"""Train by several configs with several seeds, and make the table of docs/algorithms.md:
`python tools/bench_algorithms.py configs/*demo_smollm2_cpu.yaml --short --page docs/algorithms.md`.

Runs are made one seed of all configs after the other, and what each came to is a line of OUTPUT/results.jsonl, with
`--page` of a file beside the page (docs/algorithms.jsonl). One that is there, of the same settings, is not made again:
an interrupted table goes on, `--runs 1` makes the next run alone, `--runs 0` only prints. One that fails is said and
left out. With `--page` the table of so far is in a page after each run, between the two lines that are there for it.
`--short` halves each config's steps and the prompts of a step, and evaluates before and after alone, on 128 problems.
What follows `--` goes to every run.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from spmd_rl.config.loading import load_config

HEAD = (
    "| config | greedy accuracy before | after | gained, least to most | minutes | seeds |\n|---|---|---|---|---|---|"
)
BEGIN, END = "<!-- table: tools/bench_algorithms.py -->\n", "<!-- end of table -->\n"


@dataclass(frozen=True)
class Result:
    """Hold what a run came to, as a line of results.jsonl."""

    config: str
    seed: int
    settings: str
    """Digest of the config's text, the number of ranks and what followed `--`."""
    before: float
    """Greedy accuracy before the first step."""
    after: float
    minutes: float
    """Of all steps, evaluations and start-up not counted."""


def digest(config: Path, ranks: int, overrides: Sequence[str]) -> str:
    """Return what tells runs of other settings apart."""
    text = json.dumps([config.read_text(encoding="utf-8"), ranks, list(overrides)])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def halved(config: Path) -> list[str]:
    """Return the settings of a short run: a quarter of the samples, and evaluations before and after alone."""
    train = load_config(["--config", str(config)]).train
    words = ["--train.steps", str(-(-train.steps // 2)), "--train.prompts_per_step", str(train.prompts_per_step // 2)]
    words += ["--data.eval_problems", "128", "--evaluation.every_steps", "0"]
    return [*words, "--run.export_hf", "False", "--run.tensorboard", "False"]


def train(config: Path, seed: int, ranks: int, directory: Path, overrides: Sequence[str]) -> list[dict[str, float]]:
    """Make a run, and return the rows of its metrics; what an interrupted one left is moved aside by the run."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    words = ["--config", str(config), "--run.dir", str(directory), *overrides]
    command += ["-m", load_config(words).program, *words]
    command += ["--run.seed", str(seed), "--checkpoint.resume", "never"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def accuracies(rows: Sequence[dict[str, float]]) -> tuple[float, float]:
    """Return the greedy accuracy before the first step and after the last, of the first benchmark."""
    found = [value for row in rows for name, value in row.items() if name.endswith("/accuracy")]
    if len(found) < 2:
        raise ValueError("the run was not evaluated before and after: set evaluation.before and evaluation.after")
    return found[0], found[-1]


def read(results: Path) -> list[Result]:
    """Return the results so far; a last line that was cut off is left out."""
    lines = results.read_text(encoding="utf-8").splitlines(keepends=True) if results.exists() else []
    return [Result(**json.loads(line)) for line in lines if line.endswith("\n")]


def add(results: Path, result: Result) -> None:
    """Write a result behind the others, in place of a line that was cut off."""
    results.parent.mkdir(parents=True, exist_ok=True)
    whole = [*read(results), result]
    beside = results.with_suffix(".new")
    beside.write_text("".join(json.dumps(asdict(one)) + "\n" for one in whole), encoding="utf-8")
    beside.replace(results)


def row(name: str, results: Sequence[Result]) -> str:
    """Return a row of the table: means over the seeds."""
    gained = [100 * (one.after - one.before) for one in results]
    minutes = statistics.mean(one.minutes for one in results)
    means = (statistics.mean(one.before for one in results), statistics.mean(one.after for one in results))
    first, last = (f"{100 * mean:.0f} %" for mean in means)
    return (
        f"| `{name}` | {first} | {last} | {min(gained):+.0f} to {max(gained):+.0f} | {minutes:.0f} | {len(results)} |"
    )


def table(configs: Sequence[Path], found: Sequence[Result]) -> str:
    """Return the table of those configs that have results."""
    of = {config.name: [one for one in found if one.config == config.name] for config in configs}
    return "\n".join([HEAD, *(row(name, results) for name, results in of.items() if results)]) + "\n"


def put_into(page: Path, made: str) -> None:
    """Write a table into a page, in place of the one before."""
    before, begins, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, ends, after = rest.partition(END)
    if not begins or not ends:
        raise ValueError(f"--page = {page}: it has no lines {BEGIN.strip()} and {END.strip()} for the table")
    beside = page.with_suffix(".new")
    beside.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", encoding="utf-8")
    beside.replace(page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, help="make at most so many runs now; without it, all that are missing")
    parser.add_argument("--short", action="store_true", help="half the steps, half the prompts of a step")
    parser.add_argument("--output", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--page", type=Path, help="a page to write the table into")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    arguments, overrides = parser.parse_args(words[:end]), words[end + 1 :]
    page: Path | None = arguments.page
    results = page.with_suffix(".jsonl") if page else arguments.output / "results.jsonl"
    wanted = {}
    settings = {config: (halved(config) if arguments.short else []) + overrides for config in arguments.configs}
    for seed in arguments.seeds:
        for config in arguments.configs:
            wanted[config.name, seed, digest(config, arguments.ranks, settings[config])] = config

    def there() -> dict[tuple[str, int, str], Result]:
        found = {(one.config, one.seed, one.settings): one for one in read(results)}
        return {key: found[key] for key in wanted if key in found}

    def made() -> str:
        whole = table(arguments.configs, list(there().values()))
        if page:
            put_into(page, whole)
        return whole

    missing = [key for key in wanted if key not in there()]
    made()
    failed = False
    for key in missing[: arguments.runs]:
        config, (name, seed, told) = wanted[key], key
        try:
            directory = arguments.output / f"{config.stem}_{seed}"
            rows = train(config, seed, arguments.ranks, directory, settings[config])
            minutes = sum(one.get("timing/all", 0.0) for one in rows) / 60
            add(results, Result(name, seed, told, *accuracies(rows), minutes))
            made()
        except (subprocess.CalledProcessError, OSError, ValueError) as error:
            failed = True
            print(f"{config.name}, seed {seed}: {error}", file=sys.stderr, flush=True)
    print(made(), end="")
    if left := len(wanted) - len(there()):
        print(f"{left} of {len(wanted)} runs are missing; the same command makes them", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
