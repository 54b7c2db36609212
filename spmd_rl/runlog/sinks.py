"""Sinks of a run's numbers: a file, TensorBoard, Weights & Biases, SwanLab."""

import json
import math
import netrc
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol
from urllib.parse import urlparse

from spmd_rl.config.config import Config
from spmd_rl.config.loading import dump, settings
from spmd_rl.config.redact import hidden
from spmd_rl.data.samples import as_html, thumbnails

SAMPLE_COLUMNS = ("prompt", "response", "answer", "reward", "cause")
Row = tuple[int, bool]


class Sink(Protocol):
    """Somewhere that numbers go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def samples(self, step: int, samples: Sequence[Mapping[str, object]]) -> None:
        """Take a few samples, at a few steps of a run."""

    def close(self, failed: bool) -> None: ...


class JsonLines:
    """One JSON object a row, on disk as soon as it is written. Numbers that JSON cannot hold become null."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")
        self.file.flush()

    def samples(self, step: int, samples: Sequence[Mapping[str, object]]) -> None:
        pass  # they have files of their own

    def close(self, failed: bool) -> None:
        self.file.close()


class TensorBoard:
    """Event files, written with tensorboard's own writer: torch's would bring torch along."""

    def __init__(self, config: Config, directory: Path, resumed: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        directory.mkdir(exist_ok=True)
        self.writer = EventFileWriter(str(directory))
        if resumed is not None:  # TensorBoard then shows none of the later steps of the files that are there
            start = SessionLog(status=SessionLog.START)
            self.writer.add_event(Event(wall_time=time.time(), step=resumed + 1, session_log=start))
        told = hidden(dump(config))
        self.text(resumed or 0, "config", f"```yaml\n{told}```")
        plain = {name: value for name, value in settings(config).items() if isinstance(value, bool | int | float | str)}
        self.writer.add_event(Event(wall_time=time.time(), summary=hparams_pb(hidden(plain))))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=grouped(name), simple_value=value) for name, value in metrics.items()]
        self.writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self.writer.flush()

    def samples(self, step: int, samples: Sequence[Mapping[str, object]]) -> None:
        rows = [[str(sample.get(name, "")) for name in SAMPLE_COLUMNS] for sample in samples]
        cells = [[cell.strip().replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in rows]
        lines = [" | ".join(row) for row in ([*SAMPLE_COLUMNS], ["---"] * len(SAMPLE_COLUMNS), *cells)]
        self.text(step, "samples", "\n".join(f"| {line} |" for line in lines))

    def text(self, step: int, tag: str, text: str) -> None:
        """Write Markdown."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode("utf-8", "backslashreplace")])
        value = Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
        self.writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=[value])))

    def close(self, failed: bool) -> None:
        self.writer.close()


def grouped(name: str) -> str:
    """Return a metric's name in TensorBoard, which shows what stands before the first slash as a group."""
    if name.endswith("_tps"):
        return f"speed/{name}"
    if "_rewards/" in name and name.count("/") == 1 and not name.startswith(("grpo/", "critic/")):
        return f"rules/{name}"
    return name if "/" in name else f"run/{name}"


class WeightsAndBiases:
    """A run at Weights & Biases; `identifier` is an earlier one's to go on with, which has the rows `known`."""

    def __init__(self, config: Config, run_dir: Path, identifier: str | None, known: Collection[Row] = ()) -> None:
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")  # it would say three lines of another product
        import wandb

        sys.argv = hidden(sys.argv)  # W&B keeps the command line
        if not os.access(Path.home(), os.W_OK):  # tables are written there first
            os.environ.setdefault("WANDB_DATA_DIR", f"{run_dir}/wandb")
        run = config.run
        # A bar is made of escape codes, which W&B would keep among the lines; run.log has the lines.
        captured = "off" if sys.stdout.isatty() else "auto"
        try:
            self.run = wandb.init(
                id=identifier,
                resume="allow" if identifier else None,
                entity=run.wandb_entity,
                project=run.wandb_project,
                group=run.wandb_group,
                tags=run.wandb_tags,
                name=hidden(run.name),
                dir=str(run_dir),
                mode=run.wandb,
                config=hidden(asdict(config)),
                settings=wandb.Settings(silent=True, console=captured),
            )
        except wandb.Error as error:  # no network, no such entity
            way = "look at run.wandb_entity and the key, or use --run.wandb offline and upload with `wandb sync` later"
            raise ValueError(f"run.wandb = {run.wandb}: W&B does not begin a run: {error}; {way}") from error
        self.known = frozenset(known)
        self.sync = f"wandb sync {run_dir}/wandb/offline-run-*" if run.wandb == "offline" else ""
        # W&B drops what is logged for a step that it has seen, as after a continuation from an older checkpoint. It
        # counts rows for itself, and charts have our step as their axis.
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a row, unless the run had it before it was cut short: nothing can be taken back from W&B."""
        if row_key(step, metrics) not in self.known:
            self.run.log({"step": step, **metrics})

    def samples(self, step: int, samples: Sequence[Mapping[str, object]]) -> None:
        import wandb

        if row_key(step, {}) in self.known:
            return
        columns, rows = ["step", *SAMPLE_COLUMNS], [[step, *map(one.get, SAMPLE_COLUMNS)] for one in samples]
        if pictures := thumbnails(samples):
            shown = [pictures.get((one.get("step"), one.get("index")), ()) for one in samples]
            columns.append("pictures")
            rows = [[*row, wandb.Html(as_html(some), inject=False)] for row, some in zip(rows, shown, strict=True)]
        self.run.log({"step": step, "samples": wandb.Table(columns, rows)})

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class SwanLab:
    """A run at SwanLab; `identifier` is an earlier one's to go on with, which has the rows `known`."""

    def __init__(self, config: Config, run_dir: Path, identifier: str | None, known: Collection[Row] = ()) -> None:
        import swanlab

        self.swanlab, run, directory = swanlab, config.run, run_dir / "swanlab"
        directory.mkdir(exist_ok=True)
        self.known = frozenset(known)
        online = {"id": identifier, "resume": "allow"} if identifier and run.swanlab == "online" else {}
        self.run = swanlab.init(
            workspace=run.swanlab_workspace,
            project=run.swanlab_project,
            group=run.wandb_group,
            tags=list(run.wandb_tags),
            name=hidden(run.name),
            log_dir=str(directory),
            mode=run.swanlab,
            config=hidden(asdict(config)),
            **online,
        )
        self.sync = f"swanlab sync {directory}/*" if run.swanlab == "offline" else ""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a row, unless the run had it before it was cut short."""
        if row_key(step, metrics) not in self.known:
            self.swanlab.log(dict(metrics), step=step)

    def samples(self, step: int, samples: Sequence[Mapping[str, object]]) -> None:
        if row_key(step, {}) not in self.known:
            told = ["\n\n".join(f"{name}: {sample.get(name)}" for name in SAMPLE_COLUMNS) for sample in samples]
            self.swanlab.log({"samples": [self.swanlab.Text(text) for text in told]}, step=step)

    def close(self, failed: bool) -> None:
        self.swanlab.finish()


def row_key(step: int, metrics: Mapping[str, object]) -> Row:
    """Tell rows of one step apart: those of its evaluation, and its own."""
    return step, any(name.startswith("eval/") for name in metrics)


def require_wandb_key() -> None:
    """Raise ValueError when nobody is logged in to Weights & Biases."""
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
