"""Sinks of a run's numbers: a file, TensorBoard, Weights & Biases."""

import json
import math
import netrc
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Protocol
from urllib.parse import urlparse

from spmd_rl.config.config import Config
from spmd_rl.config.redact import hidden


class Sink(Protocol):
    """Somewhere that numbers go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self, failed: bool) -> None: ...


class JsonLines:
    """One JSON object a row, on disk as soon as it is written. Numbers that JSON has no spelling for become null."""

    def __init__(self, path: Path) -> None:
        self.file = open(path, "a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self.file.write(json.dumps({"step": step, "time": round(time.time(), 3), **finite}) + "\n")
        self.file.flush()

    def close(self, failed: bool) -> None:
        self.file.close()


class TensorBoard:
    """Event files, written with tensorboard's own writer: torch's would bring torch along."""

    def __init__(self, directory: Path, resumed: int | None) -> None:
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


class WeightsAndBiases:
    """A run at Weights & Biases; `identifier` is an earlier one's to go on with."""

    def __init__(self, config: Config, run_dir: Path, identifier: str | None) -> None:
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
