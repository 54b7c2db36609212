"""A run under torchrun, seen from outside: started, watched by its files and processes, killed; no torch."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from spmd_rl.runlog.run_dir import CHECKPOINTS, METRICS

_MARK = "SPMD_RL_LAUNCHED"
_POLL_SECONDS = 0.01
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_TAIL_BYTES = 1 << 16


class Launched:
    """A launcher with its ranks. What they say goes to `output`; a directory of the run may not be shared with another.

    Leaving it as a context ends whatever of it still lives.
    """

    def __init__(
        self, arguments: Sequence[str], run_dir: Path, output: Path, ranks: int, max_restarts: int, module: str
    ) -> None:
        self.run_dir, self.output, self.module = Path(run_dir), Path(output), module
        self._mark = secrets.token_hex(8)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        command += ["--max-restarts", str(max_restarts), "-m", module, *arguments]
        environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ
        python_path = os.pathsep.join(filter(None, (_PACKAGE_ROOT, environment.get("PYTHONPATH"))))
        with self.output.open("w", encoding="utf-8") as stream:
            self.process = subprocess.Popen(
                command,
                env=environment | {_MARK: self._mark, "PYTHONPATH": python_path},
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )

    def __enter__(self) -> "Launched":
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
        """The launcher's exit status. Raises TimeoutError with the last words of the run when it does not end."""
        try:
            return self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the run did not end within {timeout_seconds:g} s:\n{self.last_words()}") from None

    def last_words(self, characters: int = 4000) -> str:
        return self.output.read_text(encoding="utf-8", errors="replace")[-characters:]

    def ranks(self, attempt: int | None = None) -> dict[int, psutil.Process]:
        """The rank processes that live, of the attempt that torchrun is at or of the one with that number (from 0)."""
        found: dict[int, dict[int, psutil.Process]] = {}
        try:
            children = psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return {}
        for child in children:
            try:
                environment = child.environ()
                if "RANK" in environment and child.status() != psutil.STATUS_ZOMBIE:
                    number = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
                    found.setdefault(number, {})[int(environment["RANK"])] = child
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found.get(max(found, default=0) if attempt is None else attempt, {})

    def leftover(self) -> list[psutil.Process]:
        """Processes of the run that live though its launcher has ended, or all of them while it has not."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == self._mark:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def until(self, happened: Callable[[], bool], timeout_seconds: float = 600.0) -> bool:
        """Wait for something; False when the run ended first. Raises TimeoutError with the run's last words."""
        deadline = time.monotonic() + timeout_seconds
        while not happened():
            if self.ended:
                return happened()
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing happened for {timeout_seconds:g} s:\n{self.last_words()}")
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
        """The step of the newest complete checkpoint; -1: there is none."""
        names = [path.parent.name for path in (self.run_dir / CHECKPOINTS).glob("step_*/files.json")]
        return max((int(name[5:]) for name in names if name[5:].isdigit()), default=-1)

    def saving(self) -> list[Path]:
        """Directories of checkpoints that are being written."""
        return list((self.run_dir / CHECKPOINTS).glob("step_*.partial"))

    def last_row(self) -> dict:
        """The newest whole row of a step's metrics; empty where there is none."""
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
