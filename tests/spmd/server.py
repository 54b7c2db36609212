"""Ranks under torchrun that do one job after another for the tests.

A job is a module with a `main()` that every rank calls (see spmd/ranks.py). A job that fails or takes too long is named
with the end of what its ranks said.
"""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Self

from spmd_rl.testing.launcher import ROOT, environment, torchrun

LOOK_SECONDS = 0.01


class Server:
    """The ranks of one torchrun, as the tests see them."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.jobs = ranks, 0
        self.directory = Path(tempfile.mkdtemp(prefix=f"spmd_{ranks}_ranks_"))
        self.said = self.directory / "said.txt"
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                torchrun(ranks, "-m", "spmd.server", str(self.directory), str(os.getpid())),
                env=environment(ROOT / "tests", VLLM_LOGGING_LEVEL="ERROR", PYTHONWARNINGS="ignore"),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def run(self, module: str, arguments: dict, timeout_seconds: float) -> list[dict]:
        """Have every rank call `module.main()`. Returns their reports in rank order."""
        job = self.directory / f"job_{self.jobs}"
        self.jobs += 1
        job.mkdir()
        (job / "arguments.json").write_text(json.dumps(arguments))
        begin = self.said.stat().st_size
        _write(job / "module", module)
        done = [job / f"done{rank}" for rank in range(self.ranks)]
        deadline = time.monotonic() + timeout_seconds
        while not all(path.exists() for path in done):
            time.sleep(LOOK_SECONDS)
            late = time.monotonic() > deadline
            if late or self.process.poll() is not None:
                missing = [rank for rank, path in enumerate(done) if not path.exists()]
                self.stop()
                said = self.said.read_bytes()[begin:].decode(errors="replace")
                why = f"did not end within {timeout_seconds:g} s" if late else "failed"
                raise AssertionError(f"{module} on {self.ranks} ranks {why}, on ranks {missing}:\n{said[-8000:]}")
        return [json.loads((job / f"rank{rank}.json").read_text()) for rank in range(self.ranks)]

    def stop(self) -> None:
        """End the ranks; torchrun ends what it has started."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def _write(path: Path, text: str) -> None:
    """Let a file appear whole."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


def serve(directory: Path, parent: int) -> None:
    """In a rank: do one job after another; end with the tests that asked, or with the first job that fails."""
    from spmd.ranks import end_megatron

    rank, number = int(os.environ["RANK"]), 0
    while True:
        job = directory / f"job_{number}"
        while not (job / "module").exists():
            time.sleep(LOOK_SECONDS)
            if not Path(f"/proc/{parent}").exists():
                os._exit(0)
        number += 1
        os.environ["SPMD_TEST_DIR"] = str(job)
        try:
            importlib.import_module((job / "module").read_text()).main()
            if "megatron.core" in sys.modules:
                end_megatron()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        _write(job / f"done{rank}", "")


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
