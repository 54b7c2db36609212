"""Ranks started by torchrun, and a run seen from outside: watched by its files and processes, killed; no torch."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import psutil

from spmd_rl.runlog.run_dir import CHECKPOINTS, METRICS

MODULE = "spmd_rl.grpo"
_MARK = "SPMD_RL_LAUNCHED"
_POLL_SECONDS = 0.01
_TAIL_BYTES = 1 << 16

ROOT = Path(__file__).resolve().parents[2]


def torchrun(ranks: int, *words: object, max_restarts: int = 0) -> list[str]:
    """Return the command that starts ranks on this machine; `words`: a script, or -m and a module, and arguments."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return [*launcher, *(["--max-restarts", str(max_restarts)] if max_restarts else []), *map(str, words)]


def environment(*more_paths: Path, **variables: str) -> dict[str, str]:
    """Return this process' environment for ranks of this source: one thread each, quiet where it is not set."""
    found = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ
    paths = (*map(str, (ROOT, *more_paths)), found.get("PYTHONPATH"))
    return found | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | variables


class LaunchedRun:
    """A launcher with its ranks. Their output goes to `output`; a directory of the run may not be shared with another.

    Leaving it as a context ends whatever of it still lives.
    """

    def __init__(
        self, arguments: Sequence[str], run_dir: Path, output: Path, ranks: int, max_restarts: int, module: str = MODULE
    ) -> None:
        self.run_dir, self.output = Path(run_dir), Path(output)
        self._mark = secrets.token_hex(8)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        with self.output.open("w", encoding="utf-8") as stream:
            self.process = subprocess.Popen(
                torchrun(ranks, "-m", module, *arguments, max_restarts=max_restarts),
                env=environment(**{_MARK: self._mark}),
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        for process in self.leftover():
            process.kill()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self, timeout_seconds: float) -> int:
        """Return the launcher's exit status. Raises TimeoutError with the end of the output when it does not come."""
        try:
            return self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the run did not end within {timeout_seconds:g} s:\n{self.tail()}") from None

    def tail(self, characters: int = 4000) -> str:
        """Return the end of the output."""
        return self.output.read_text(encoding="utf-8", errors="replace")[-characters:]

    def ranks(self, attempt: int | None = None) -> dict[int, psutil.Process]:
        """Return rank -> its living process, of torchrun's present attempt or of the one with that number (from 0)."""
        found: dict[int, dict[int, psutil.Process]] = {}
        try:
            children = psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return {}
        for child in children:
            try:
                variables = child.environ()
                if "RANK" in variables and child.status() != psutil.STATUS_ZOMBIE:
                    number = int(variables.get("TORCHELASTIC_RESTART_COUNT", "0"))
                    found.setdefault(number, {})[int(variables["RANK"])] = child
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found.get(max(found, default=0) if attempt is None else attempt, {})

    def leftover(self) -> list[psutil.Process]:
        """Return processes of the run that live though its launcher has ended, or all of them while it has not."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == self._mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def until(self, happened: Callable[[], bool], timeout_seconds: float = 600.0) -> bool:
        """Wait for something; False when the run ended first. Raises TimeoutError with the end of the output."""
        deadline = time.monotonic() + timeout_seconds
        while not happened():
            if self.ended:
                return happened()
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing happened for {timeout_seconds:g} s:\n{self.tail()}")
            time.sleep(_POLL_SECONDS)
        return True

    def kill(self, rank: int) -> bool:
        """SIGKILL one rank; False where it is not there."""
        process = self.ranks().get(rank)
        if process is None:
            return False
        try:
            process.kill()
        except psutil.NoSuchProcess:
            return False
        return True

    def newest(self) -> int:
        """Return the step of the newest complete checkpoint; -1: there is none."""
        names = [path.parent.name for path in (self.run_dir / CHECKPOINTS).glob("step_*/files.json")]
        return max((int(name[5:]) for name in names if name[5:].isdigit()), default=-1)

    def saving(self) -> list[Path]:
        """Return the directories of checkpoints that are being written."""
        return list((self.run_dir / CHECKPOINTS).glob("step_*.partial"))

    def last_row(self) -> dict[str, float]:
        """Return the newest whole row of a step's metrics; empty where there is none."""
        try:
            with (self.run_dir / METRICS).open("rb") as stream:
                stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = stream.read().splitlines(keepends=True)
        except OSError:
            return {}
        for line in reversed(lines):
            if line.startswith(b"{") and line.endswith(b"\n") and "timing/all" in (row := json.loads(line)):
                return row
        return {}
