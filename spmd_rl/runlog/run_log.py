"""What is kept of a run, and what is shown of it: rank 0 only; the other ranks are silent."""

import json
import math
import netrc
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.parse import urlparse

from spmd_rl.config.config import CheckpointConfig, Config
from spmd_rl.config.redact import hidden
from spmd_rl.data.samples import SAMPLES, samples_file, samples_step, write_samples
from spmd_rl.distributed.status import current_status, set_status
from spmd_rl.runlog.checkpoint_store import CheckpointStore
from spmd_rl.runlog.console import SUMMARY, Console, console, conversation, evaluation_line, step_line, summary

METRICS = "metrics.jsonl"
RANKS = "ranks.jsonl"
EVALUATIONS = "evaluations"
CHECKPOINTS = "checkpoints"
WRITTEN_HERE = (
    *("config.yaml", METRICS, RANKS, "run.log", SAMPLES, EVALUATIONS, "tensorboard", "wandb", "hf", "report", "hang"),
    CHECKPOINTS,
)

Timed = Callable[[str], AbstractContextManager[None]]


class Sink(Protocol):
    """Somewhere that numbers go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, failed: bool) -> None: ...


class RunLog:
    """Steps count from 1; step 0 is before training.

    What an earlier run left in `run_dir` is moved to `run_dir`/earlier/. With `resumed`, a number of steps, the run
    that is there goes on after these, and only what it did later is moved; `identity` is what the property of that name
    was then. `restarts`: how often torchrun has started the ranks again; `lost_after`: of what is there, rows after
    this step are lost with the ranks before; None where all of it is another run's. After a continuation or restart
    the next row has restart/count, restart/lost_steps and restart/lost_seconds, of steps whose rows were moved. Raises
    ValueError when W&B cannot be reached as the configuration asks.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        world_size: int,
        resumed: int | None = None,
        identity: Mapping[str, str] | None = None,
        restarts: int = 0,
        lost_after: int | None = 0,
    ):
        self.config = config
        self.run_dir = Path(run_dir)
        self.world_size = world_size
        if config.run.wandb == "online":
            require_wandb_key()
        again = resumed is not None or restarts > 0
        lost_after = resumed if resumed is not None else lost_after
        lost = _lost(self.run_dir, lost_after) if again and lost_after is not None else (0, 0.0)
        moved = _set_aside(self.run_dir) if resumed is None else _set_later_aside(self.run_dir, resumed)
        (self.run_dir / SAMPLES).mkdir(parents=True, exist_ok=True)
        self._text = open(self.run_dir / "run.log", "w" if resumed is None else "a", encoding="utf-8")
        # All of a row is on disk. What stays in memory is what `summary` reads, or a long run would fill it.
        self._rows: list[dict[str, float]] = []
        self._evaluations: list[tuple[int, dict[str, float]]] = []
        self._last: dict[str, float] = {}
        if resumed is not None:
            self._read_rows()
        self._sinks: list[Sink] = [_JsonLines(self.run_dir / METRICS)]
        self._ranks = open(self.run_dir / RANKS, "a", encoding="utf-8")
        if config.run.tensorboard:
            self._sinks.append(_TensorBoard(self.run_dir / "tensorboard", resumed))
        self._identity: dict[str, str] = {}
        if config.run.wandb != "off":
            online = _WeightsAndBiases(config, self.run_dir, (identity or {}).get("wandb"))
            self._sinks.append(online)
            self._identity["wandb"] = online.run.id
        self._values: dict[str, list[float]] = defaultdict(list)
        # The next row has these too.
        self._once: dict[str, float] = {}
        self._open_phases: list[_Phase] = []
        self._skipped = 0
        self._closed = False
        self._console: Console = console(config.train.steps)
        self.note(
            f"run {config.run.name}: {world_size} ranks, {config.train.steps} steps of {config.train.prompts_per_step}"
            f" prompts x {config.algorithm.samples_per_prompt} samples; everything goes to {self.run_dir}"
        )
        if resumed is not None:
            self.note(f"goes on after step {resumed}")
        if moved:
            what = "what an earlier run had left there" if resumed is None else f"what it had done after step {resumed}"
            self.note(f"{what} is in {moved}")
        if again:
            self._once = {"restart/count": restarts, "restart/lost_steps": lost[0], "restart/lost_seconds": lost[1]}
            started = f"torchrun has started the ranks again {restarts} times; " if restarts else ""
            self.note(f"{started}lost: {lost[0]} steps ({lost[1]:.1f} s), and what was under way")

    @property
    def identity(self) -> dict[str, str]:
        """What the run is called elsewhere: name of a service -> its identifier."""
        return dict(self._identity)

    @property
    def last(self) -> dict[str, float]:
        """The metrics of the newest step, evaluations after it included."""
        return dict(self._last)

    def _read_rows(self) -> None:
        metrics = self.run_dir / METRICS
        for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []:
            row = {name: math.nan if value is None else value for name, value in json.loads(line).items()}
            step, _ = int(row.pop("step")), row.pop("time", None)
            self._remember(step, row)

    def _remember(self, step: int, metrics: Mapping[str, float]) -> None:
        before = self._last if self._last.get("step") == step else {}
        self._last = before | {"step": step} | metrics
        if any(name.startswith("eval/") for name in metrics):
            self._evaluations[1:] = [(step, dict(metrics))]  # the first and the newest
        else:
            self._rows.append({name: metrics[name] for name in SUMMARY if name in metrics})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.note(summary(self._rows, self._evaluations, self._places()))
        else:
            done = len(self._rows)
            self.note(f"cut short by {kind.__name__} after {done} steps; what was measured is in {self.run_dir}")
        self.close(failed=kind is not None)

    def note(self, text: str) -> None:
        """Say something once, without secrets, on the console and in run.log."""
        text = hidden(text)
        self._text.write(text + "\n")
        self._text.flush()
        self._console.line(text)

    @contextmanager
    def step(self, step: int) -> Iterator[Timed]:
        """One step; yields `timed`. At the end what was added becomes a row, unless the step was cut short."""
        self._values.clear()
        started = time.perf_counter()
        set_status(step=step, phase="between phases")
        yield self.timed
        self.add("timing/all", time.perf_counter() - started)
        metrics = {name: combine(name, values) for name, values in self._values.items()}
        sequences = self.config.train.prompts_per_step * self.config.algorithm.samples_per_prompt
        metrics |= tokens_per_second(metrics, sequences, self.world_size)
        metrics |= self._once
        self._once = {}
        self._values.clear()
        self._write(step, metrics)
        self._console.advance(step)
        self.note(step_line({"step": step, **metrics}, self.config.train.steps, self.world_size))

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds inside to timing/<phase>, less those of phases inside it: a step's phases never overlap.

        Outside a step only the console shows it.
        """
        current = _Phase(phase)
        self._open_phases.append(current)
        self._console.doing(phase)
        outer = current_status().phase
        set_status(phase=phase)
        try:
            yield
        finally:
            set_status(phase=outer)
            self._open_phases.pop()
            total = time.perf_counter() - current.started
            self.add(f"timing/{phase}", total - current.inner_seconds)
            if self._open_phases:
                self._open_phases[-1].inner_seconds += total
            self._console.doing(self._open_phases[-1].name if self._open_phases else "")

    def add(self, name: str, value: float) -> None:
        """A number of the current step; several of one name become one as `combine` says."""
        self._values[name].append(float(value))

    def add_all(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.add(name, value)

    def learning(self, metrics: Mapping[str, float], skipped: str = "") -> None:
        """What one optimizer step reports. `skipped`: why its update was not made.

        Raises RuntimeError after train.max_skipped of those in a row.
        """
        self.add_all(metrics)
        self._skipped = self._skipped + 1 if skipped else 0
        if not skipped:
            return
        self.note(f"step {current_status().step}: the update was skipped: {skipped}")
        if self._skipped >= self.config.train.max_skipped:
            raise RuntimeError(
                f"train.max_skipped = {self.config.train.max_skipped}: so many updates in a row were skipped, the "
                f"last one in step {current_status().step}: {skipped}; the weights are as they were before them: look "
                "at the samples of these steps, lower train.learning_rate or train.clip_grad, or train in float32"
            )

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]], show: int = 0) -> None:
        """Keep conversations, as data.samples.conversation makes them; show the first few."""
        write_samples(self.run_dir / SAMPLES / samples_file(step), samples)
        for sample in samples[:show]:
            self.note(conversation(sample))

    def ranks(self, step: int, numbers: Sequence[Mapping[str, float]]) -> None:
        """Keep numbers of each rank, of which the metrics have the largest: in ranks.jsonl, in rank order."""
        columns = {name: [rank[name] for rank in numbers] for name in numbers[0]}
        self._ranks.write(json.dumps({"step": step, **columns}) + "\n")
        self._ranks.flush()

    def questions(self, step: int, benchmark: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Keep what an evaluation asked and what came back: one question a line (evaluation/benchmark.py)."""
        write_samples(self.run_dir / EVALUATIONS / f"step_{step:06d}_{benchmark}.jsonl", lines)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of an evaluation after `step` steps: a row of their own."""
        if not metrics:
            return
        self._write(step, metrics)
        self.note(evaluation_line(step, metrics))

    def close(self, failed: bool = False) -> None:
        """Stop the display and close every file; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._console.close()
        for sink in self._sinks:
            sink.close(failed)
        self._ranks.close()
        self._text.close()

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._remember(step, metrics)
        for sink in self._sinks:
            sink.write(step, metrics)

    def _places(self) -> dict[str, Path]:
        places = {"metrics": METRICS, "samples": SAMPLES, "evaluations": EVALUATIONS, "tensorboard": "tensorboard"}
        places |= {"w&b": "wandb", "model": "hf"}
        return {name: self.run_dir / place for name, place in places.items() if (self.run_dir / place).exists()}


class _Phase:
    def __init__(self, name: str):
        self.name = name
        self.started = time.perf_counter()
        self.inner_seconds = 0.0


def combine(name: str, values: Sequence[float]) -> float:
    """Several values of one metric in a step: seconds and bytes add up, extremes stay, the rest is averaged."""
    if name.startswith(("timing/", "bytes/")):
        return math.fsum(values)
    if name.endswith(("max", "peak_bytes")):
        return max(values)
    if name.endswith("/min"):
        return min(values)
    return math.fsum(values) / len(values)


def tokens_per_second(metrics: Mapping[str, float], sequences: int, world_size: int) -> dict[str, float]:
    """Throughput per rank in each phase that was timed; `sequences`: of all ranks in the step."""
    if "response_length/mean" not in metrics or "prompt_length/mean" not in metrics:
        return {}
    responses = metrics["response_length/mean"] * sequences / world_size
    tokens = responses + metrics["prompt_length/mean"] * sequences / world_size
    rates = (
        ("e2e_tps", tokens, "timing/all"),
        ("update_tps", tokens, "timing/update"),
        ("vllm_tps", tokens, "timing/rollout"),
        ("rollout/response_tps", responses, "timing/rollout"),
    )
    return {name: count / metrics[timing] for name, count, timing in rates if metrics.get(timing, 0.0) > 0}


def require_wandb_key() -> None:
    """Raises ValueError when nobody is logged in to Weights & Biases."""
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        stored = netrc.netrc().authenticators(host)
    except (FileNotFoundError, netrc.NetrcParseError):
        stored = None
    if not os.environ.get("WANDB_API_KEY") and not stored:
        raise ValueError(
            f"run.wandb = online: no key for {host} in WANDB_API_KEY or ~/.netrc; set it, or log in with "
            "`wandb login`, or use --run.wandb offline and upload with `wandb sync` later"
        )


def _lost(run_dir: Path, step: int) -> tuple[int, float]:
    """Whole steps that the run had done after `step`, and the seconds from then to the end of the last of them."""
    metrics = run_dir / METRICS
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True) if metrics.exists() else []
    done = [json.loads(line) for line in lines if line.endswith("\n")]
    later = [row for row in done if row["step"] > step]
    if not later:
        return 0, 0.0
    before = [row["time"] for row in done if row["step"] <= step]
    begun = before[-1] if before else later[0]["time"] - later[0].get("timing/all", 0.0)
    return int(later[-1]["step"]) - step, later[-1]["time"] - begun


def _set_aside(run_dir: Path) -> Path | None:
    """Move an earlier run's files, and nothing else, out of the way.

    A directory with metrics has a run's files; they go last, so that a kill in between leaves the rest to the next.
    """
    if not (run_dir / METRICS).exists():
        return None
    target = _free(run_dir / "earlier")
    target.mkdir(parents=True)
    for name in sorted(WRITTEN_HERE, key=METRICS.__eq__):
        if (run_dir / name).exists():
            (run_dir / name).rename(target / name)
    return target


def _set_later_aside(run_dir: Path, step: int) -> Path | None:
    """Move what a run did after a step out of the way: rows of metrics, samples, checkpoints."""
    kept, later = {}, {}
    for name in (METRICS, RANKS):
        kept[name], later[name] = _lines_until(run_dir / name, step)
    files = [
        path
        for place in (SAMPLES, EVALUATIONS)
        for path in (run_dir / place).glob("step_*")
        if samples_step(path.name) > step
    ]
    checkpoints = CheckpointStore(run_dir / CHECKPOINTS, CheckpointConfig())
    if not any(later.values()) and not files and not checkpoints.after(step):
        return None
    target = _free(run_dir / "earlier")
    target.mkdir(parents=True)
    checkpoints.set_aside(step, target / CHECKPOINTS)
    for path in files:
        (target / path.parent.name).mkdir(exist_ok=True)
        path.rename(target / path.parent.name / path.name)
    for name in kept:
        (target / name).write_text("".join(later[name]), encoding="utf-8")
        scratch = run_dir / (name + ".new")
        scratch.write_text("".join(kept[name]), encoding="utf-8")
        scratch.rename(run_dir / name)
    return target


def _lines_until(path: Path, step: int) -> tuple[list[str], list[str]]:
    """The lines of steps up to this one, and the others."""
    kept, later = [], []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []:
        whole = line.endswith("\n")  # a line without its end was being written when the run ended
        (kept if whole and json.loads(line)["step"] <= step else later).append(line)
    return kept, later


def _free(directory: Path) -> Path:
    number = 1
    while (directory / str(number)).exists():
        number += 1
    return directory / str(number)


class _JsonLines:
    """One JSON object a row, on disk as soon as it is written. Numbers that JSON has no spelling for become null."""

    def __init__(self, path: Path):
        self.file = open(path, "a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")
        self.file.flush()

    def close(self, failed: bool) -> None:
        self.file.close()


class _TensorBoard:
    """Event files, written with tensorboard's own writer: torch's would bring torch along."""

    def __init__(self, directory: Path, resumed: int | None):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory.mkdir(exist_ok=True)
        self.writer = EventFileWriter(str(directory))
        if resumed is not None:  # TensorBoard then shows none of the later steps of the files that are there
            start = SessionLog(status=SessionLog.START)
            self.writer.add_event(Event(wall_time=time.time(), step=resumed + 1, session_log=start))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self.writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self.writer.flush()

    def close(self, failed: bool) -> None:
        self.writer.close()


class _WeightsAndBiases:
    def __init__(self, config: Config, run_dir: Path, identifier: str | None):
        import wandb

        sys.argv = hidden(sys.argv)  # W&B keeps the command line
        self.run = wandb.init(
            id=identifier,
            resume="allow" if identifier else None,
            project=config.run.wandb_project,
            name=hidden(config.run.name),
            dir=str(run_dir),
            mode=config.run.wandb,
            config=hidden(asdict(config)),
            settings=wandb.Settings(silent=True),
        )
        # W&B drops what is logged for a step that it has seen, as after a continuation from an older checkpoint. It
        # counts rows for itself, and charts have our step as their axis.
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log({"step": step, **metrics})

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))
