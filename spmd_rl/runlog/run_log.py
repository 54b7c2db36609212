"""The log of a run, kept and shown: rank 0 only; the other ranks are silent."""

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from spmd_rl.config.config import Config
from spmd_rl.config.names import ALIASES, Phase
from spmd_rl.config.redact import hidden
from spmd_rl.data.samples import SAMPLES, SKIPPED, samples_file, write_samples
from spmd_rl.data.tickets import UNJUDGED
from spmd_rl.distributed.status import current_status, set_status
from spmd_rl.runlog.console import (
    FAILURES,
    SUMMARY,
    Console,
    console,
    cut_short,
    evaluation_line,
    sample_text,
    step_line,
    summary,
)
from spmd_rl.runlog.launches import keep_launch, this_launch
from spmd_rl.runlog.run_dir import (
    EVALUATIONS,
    METRICS,
    RANKS,
    finished_steps,
    lost_work,
    set_aside,
    set_later_aside,
    way_on,
)
from spmd_rl.runlog.sinks import JsonLines, Sink, SwanLab, TensorBoard, WeightsAndBiases, require_wandb_key, row_key
from spmd_rl.runlog.start_up import StartUp

TABLES, TABLE_ROWS = 8, 8
"""TensorBoard and the like are given so many tables of samples in a run, of so many rows."""
Timed = Callable[[str], AbstractContextManager[None]]


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
        start_up: StartUp | None = None,
    ) -> None:
        self.config = config
        self.run_dir = Path(run_dir)
        self.world_size = world_size
        if config.run.wandb == "online":
            require_wandb_key()
        again = resumed is not None or restarts > 0
        after = resumed if resumed is not None else lost_after
        lost = lost_work(self.run_dir, after) if again and after is not None else (0, 0.0)
        finished = bool(resumed) and not restarts and resumed == finished_steps(self.run_dir)
        known = () if resumed is None else later_rows(self.run_dir, resumed)
        moved = set_aside(self.run_dir) if resumed is None else set_later_aside(self.run_dir, resumed)
        (self.run_dir / SAMPLES).mkdir(parents=True, exist_ok=True)
        launch = this_launch(world_size, resumed or 0)
        keep_launch(self.run_dir, launch)
        self._text = open(self.run_dir / "run.log", "w" if resumed is None else "a", encoding="utf-8")
        # All of a row is on disk. What stays in memory is what `summary` reads, or a long run would fill it.
        self._rows: list[dict[str, float]] = []
        self._evaluations: list[tuple[int, dict[str, float]]] = []
        self._last: dict[str, float] = {}
        if resumed is not None:
            self._read_rows()
        self._sinks: list[Sink] = [JsonLines(self.run_dir / METRICS)]
        self._ranks = open(self.run_dir / RANKS, "a", encoding="utf-8")
        if config.run.tensorboard:
            self._sinks.append(TensorBoard(config, self.run_dir / "tensorboard", resumed))
        self._identity: dict[str, str] = {}
        self._online: list[WeightsAndBiases | SwanLab] = []
        for name, mode, sink in (
            ("wandb", config.run.wandb, WeightsAndBiases),
            ("swanlab", config.run.swanlab, SwanLab),
        ):
            if mode != "off":
                self._online.append(sink(config, self.run_dir, (identity or {}).get(name), known))
                self._identity[name] = self._online[-1].run.id
        self._sinks += self._online
        self._values: dict[str, list[float]] = defaultdict(list)
        # The next row has these too.
        row = {"restart/count": restarts, "restart/lost_steps": lost[0], "restart/lost_seconds": lost[1]}
        self._once: dict[str, float] = row if again else {}
        self._open_phases: list[_Phase] = []
        self._skipped: dict[str, int] = defaultdict(int)
        """Updates of each model, the last ones in a row, that were not made."""
        self._failed_steps = 0
        self.failed_saves: list[int] = []
        """The steps after which a checkpoint could not be saved."""
        self._closed = False
        self._console: Console = start_up.console if start_up else console(config.train.steps)
        steps, prompts = config.train.steps, config.train.prompts_per_step
        self.note(
            f"run {config.run.name}: {world_size} rank{'s' * (world_size != 1)}, {steps} step{'s' * (steps != 1)} of "
            f"{prompts} prompts x {config.algorithm.samples_per_prompt} samples; everything goes to {self.run_dir}"
        )
        self.keep(f"launched {launch.time} on {launch.host}: {launch.command}")
        self.keep(", ".join([f"commit {launch.commit or 'unknown'}", *(" ".join(v) for v in launch.versions.items())]))
        if start_up:
            start_up.note = self.note
        if resumed is not None:
            self.note(f"resuming from step {resumed}")
        if moved:
            what = "what an earlier run had left there" if resumed is None else f"what it had done after step {resumed}"
            self.note(f"{what} is in {moved}")
        if again and not finished:
            times = f"torchrun has started the ranks again {restarts} time{'s' * (restarts != 1)}; "
            self.note(f"{times * (restarts > 0)}lost: {lost[0]} steps ({lost[1]:.1f} s), and what was under way")

    @property
    def identity(self) -> dict[str, str]:
        """The run's identifier elsewhere, by name of the service."""
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
            row = {"step": step, **metrics}
            self._rows.append(
                {name: row[name] for name in SUMMARY if name in row and (row[name] or name not in FAILURES)}
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.note(summary(self._rows, self._evaluations, self._places(), self.failed_saves))
            for sink in self._online:
                if sink.sync:
                    self.note(f"to upload it: {sink.sync}")
        else:
            self.note(cut_short(error or kind(), len(self._rows)))
            way = way_on(self.run_dir, self.config.checkpoint.resume)
            self.note(f"what was measured is in {self.run_dir}; {way}")
        self.close(failed=kind is not None)

    def note(self, text: str) -> None:
        """Say something once, without secrets, on the console and in run.log."""
        self.keep(text)
        self._console.line(hidden(text))

    def keep(self, text: str) -> None:
        """Write something to run.log alone, without secrets."""
        self._text.write(hidden(text) + "\n")
        self._text.flush()

    def save_failed(self, step: int, text: str) -> None:
        """Say why a checkpoint could not be saved; the summary counts it."""
        self.failed_saves.append(step)
        self.note(text)

    @contextmanager
    def step(self, step: int) -> Iterator[Timed]:
        """Log one step; yields `timed`. At the end what was added becomes a row, unless the step was cut short."""
        self._values.clear()
        started = time.perf_counter()
        set_status(step=step, phase=Phase.BETWEEN)
        yield self.timed
        self.add("timing/all", time.perf_counter() - started)
        metrics = {name: combine(name, values) for name, values in self._values.items()}
        sequences = self.config.train.prompts_per_step * self.config.algorithm.samples_per_prompt
        sequences = int(metrics.get("rollout/samples", sequences))
        metrics |= tokens_per_second(metrics, sequences, self.world_size)
        metrics |= {alias: metrics[name] for name, alias in ALIASES.items() if name in metrics}
        metrics |= self._once
        self._once = {}
        self._values.clear()
        self._write(step, metrics)
        self._console.advance(step)
        reference = self.config.algorithm.uses_reference
        self.note(step_line({"step": step, **metrics}, self.config.train.steps, self.world_size, reference))
        self._count_failed(step, metrics)

    def _count_failed(self, step: int, metrics: Mapping[str, float]) -> None:
        """Say that the rules failed on all of a step's samples, or that none applied to any.

        RuntimeError after reward.max_failed_steps in a row of the first.
        """
        if metrics.get(f"reward/cause/{UNJUDGED}", 0.0) > 1 - 1e-9 and not self.config.reward.models:
            self.note(f"step {step}: no rule applies to any of its samples (each returned None), so all rewards are 0")
        crashed, late = (metrics.get(f"reward/cause/{cause}", 0.0) for cause in ("crash", "timeout"))
        if crashed + late < 1 - 1e-9:
            self._failed_steps = 0
            return
        self._failed_steps += 1
        why = f"the rules failed on every sample: {crashed:.0%} crashed, {late:.0%} took too long"
        self.note(f"step {step}: {why}; each rule's first failure is in the ranks' output, with its traceback")
        limit = self.config.reward.max_failed_steps
        if limit and self._failed_steps >= limit:
            raise RuntimeError(
                f"reward.max_failed_steps = {limit}: so many steps in a row taught nothing, the last one step {step}: "
                f"{why}; correct the rules, give them more reward.timeout_seconds or reward.memory_mib, or set "
                "this to 0 to go on regardless"
            )

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
        """Add a number of the current step; several of one name become one as `combine` says."""
        self._values[name].append(float(value))

    def add_all(self, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.add(name, value)

    def learning(self, metrics: Mapping[str, float], skipped: str = "", model: str = "policy") -> None:
        """Add what one optimizer step of a model reports. `skipped`: why its update was not made.

        Raises RuntimeError after train.max_skipped of those in a row.
        """
        self.add_all(metrics)
        self._skipped[model] = self._skipped[model] + 1 if skipped else 0
        if not skipped:
            return
        of = "" if model == "policy" else f" of the {model}"
        self.note(f"step {current_status().step}: the update{of} was skipped: {skipped}")
        if self._skipped[model] >= self.config.train.max_skipped:
            raise RuntimeError(
                f"train.max_skipped = {self.config.train.max_skipped}: so many updates{of} in a row were skipped, the "
                f"last one in step {current_status().step}: {skipped}; the weights are as they were before them: look "
                "at the samples of these steps, lower train.learning_rate or train.clip_grad, or train in float32"
            )

    def skipped_samples(
        self, step: int, minibatch: int, samples: Sequence[Mapping[str, object]], model: str = "policy"
    ) -> None:
        """Keep the samples that a model's update of a mini-batch was skipped for."""
        of = "" if model == "policy" else f"_{model}"
        write_samples(self.run_dir / SKIPPED / f"step_{step:06d}_minibatch_{minibatch}{of}.jsonl", samples)

    def samples(self, step: int, samples: Sequence[Mapping[str, object]], show: int = 0) -> None:
        """Keep samples, as data.samples.sample_record makes them; show the first few."""
        write_samples(self.run_dir / SAMPLES / samples_file(step), samples)
        if samples and (step in (1, steps := self.config.train.steps) or step % max(1, steps // TABLES) == 0):
            few = hidden(list(samples[:TABLE_ROWS]))
            self._tell(lambda sink: sink.samples(step, few))
        for sample in samples[:show]:
            self.note(sample_text(sample))

    def ranks(self, step: int, numbers: Sequence[Mapping[str, float]]) -> None:
        """Keep numbers of each rank, of which the metrics have the largest: in ranks.jsonl, in rank order."""
        columns = {name: [rank[name] for rank in numbers] for name in numbers[0]}
        self._ranks.write(json.dumps({"step": step, **columns}) + "\n")
        self._ranks.flush()

    def questions(self, step: int, benchmark: str, lines: Sequence[Mapping[str, object]]) -> None:
        """Keep what an evaluation asked and what came back: one question a line (evaluation/benchmark.py)."""
        write_samples(self.run_dir / EVALUATIONS / f"step_{step:06d}_{benchmark}.jsonl", lines)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the numbers of an evaluation after `step` steps: a row of their own."""
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
        self._tell(lambda sink: sink.close(failed))
        self._ranks.close()
        self._text.close()

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._remember(step, metrics)
        self._tell(lambda sink: sink.write(step, metrics))

    def _tell(self, act: Callable[[Sink], None]) -> None:
        """Have every sink do something; one that fails, but for the run's own file, is left out from then on."""
        for sink in list(self._sinks):
            try:
                act(sink)
            except Exception as error:
                if isinstance(sink, JsonLines):
                    raise
                self._sinks.remove(sink)
                name = type(sink).__name__
                self.note(
                    f"{name} failed, and is given nothing more: {type(error).__name__}: {error}; {METRICS} has all rows"
                )

    def _places(self) -> dict[str, Path]:
        places = {"metrics": METRICS, "samples": SAMPLES, "evaluations": EVALUATIONS, "tensorboard": "tensorboard"}
        places |= {"skipped": SKIPPED, "w&b": "wandb", "swanlab": "swanlab", "model": "hf", "critic": "hf_critic"}
        return {name: self.run_dir / place for name, place in places.items() if (self.run_dir / place).exists()}


class _Phase:
    def __init__(self, name: str) -> None:
        self.name = name
        self.started = time.perf_counter()
        self.inner_seconds = 0.0


def combine(name: str, values: Sequence[float]) -> float:
    """Join several values of one metric in a step: seconds and bytes add up, extremes stay, the rest is averaged."""
    if name.startswith(("timing/", "bytes/")):
        return math.fsum(values)
    if name.endswith(("max", "peak_bytes", "rollout/refills", "rollout/samples")):
        return max(values)
    if name.endswith("/min"):
        return min(values)
    return math.fsum(values) / len(values)


def tokens_per_second(metrics: Mapping[str, float], sequences: int, world_size: int) -> dict[str, float]:
    """Return throughput per rank in each phase that was timed; `sequences`: of all ranks in the step."""
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


def later_rows(run_dir: Path, step: int) -> list[tuple[int, bool]]:
    """Return the rows of metrics that a run wrote after a step."""
    metrics = run_dir / METRICS
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True) if metrics.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row_key(row["step"], row) for row in rows if row["step"] > step]
