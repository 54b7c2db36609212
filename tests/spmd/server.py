"""Ranks for the tests, without the minutes that importing takes: one process imports everything, and each job's ranks
are forked from it. So no job sees what another has left in a process.

A job is a module with a `main()` that every rank calls (see spmd/ranks.py). A job that fails or takes too long is named
with the end of what its ranks said, and with what its first rank that failed raised.
"""

import atexit
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from deadlines import crowding
from spmd_rl.testing.launcher import ROOT, environment

if TYPE_CHECKING:
    from spmd_rl.platforms.platform import Platform

LOOK_SECONDS = 0.01
MOST_THREADS = 300
"""Of a rank at the end of its job: a layout's process groups, with some threads each, end with the layout."""
# What the ranks of most jobs import, in the end, beside what the program's own modules import on loading.
PRELOADED = (
    "megatron.core.dist_checkpointing",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "transformers",
    "spmd_rl.worker.train_worker",
    "spmd_rl.rollout.engine",
)


class Server:
    """The process from which ranks are forked, as the tests see it."""

    def __init__(self, module: str = "spmd.server") -> None:
        self.jobs = 0
        self.directory = Path(tempfile.mkdtemp(prefix="spmd_ranks_"))
        with (self.directory / "said.txt").open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module],
                env=environment(ROOT / "tests", VLLM_LOGGING_LEVEL="ERROR", PYTHONWARNINGS="ignore"),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )

    def run(self, module: str, ranks: int, arguments: dict, timeout_seconds: float) -> list[dict]:
        """Have so many ranks call `module.main()`. Returns their reports in rank order."""
        job = self.directory / f"job_{self.jobs}"
        self.jobs += 1
        job.mkdir()
        (job / "arguments.json").write_text(json.dumps(arguments))
        asked = {"module": module, "ranks": ranks, "directory": str(job), "timeout_seconds": timeout_seconds}
        try:
            with suppress(BrokenPipeError):
                self.process.stdin.write(json.dumps(asked) + "\n")
                self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BaseException:  # pytest's own deadline: what this job answers later is not the next one's
            the_server.cache_clear()
            for process in (*psutil.Process(self.process.pid).children(recursive=True), self.process):
                process.kill()
            raise
        if not answer:
            the_server.cache_clear()
            raise AssertionError(f"what ranks are forked from has ended:\n{_end(self.directory / 'said.txt')}")
        if problem := json.loads(answer)["problem"]:
            raised = "".join(path.read_text() for path in sorted(job.glob("raised*"))[:1])
            raise AssertionError(f"{_end(job / 'said.txt')}\n{module} on {ranks} ranks {problem}\n{raised}")
        return [json.loads((job / f"rank{rank}.json").read_text()) for rank in range(ranks)]

    def stop(self) -> None:
        """End it; with it ends what it has forked."""
        self.process.stdin.close()
        self.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


@cache
def the_server(module: str = "spmd.server") -> Server:
    """Return the one of this session of tests for a kind of ranks."""
    server = Server(module)
    atexit.register(server.stop)
    return server


def _end(file: Path) -> str:
    return file.read_text(errors="replace")[-6000:]


def preload(machine: "Platform") -> None:
    """Import what ranks on this machine import, with the patches of all libraries."""
    import gc

    from spmd.ranks import patched

    machine.set_environment()
    patched(machine, "torch_gloo", "megatron_core", "vllm")
    from spmd_rl.patches.unused_imports import server, standing_in

    with standing_in(server()):  # as a rank has it
        for module in PRELOADED:
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is never looked at is never copied


def serve(machine: "Platform") -> None:
    """Fork the ranks of one job after another, until who asks is gone."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    preload(machine)
    # Fork copies the thread that forks, and no other.
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "importing has started threads"
    parent = os.getppid()
    for line in sys.stdin:
        problem = _do(json.loads(line), parent)
        print(json.dumps({"problem": problem}), file=answers, flush=True)


def _do(job: dict, parent: int) -> str:
    """Fork a job's ranks and wait for them; what went wrong."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    looked, taken = time.monotonic(), 0.0
    running: dict[int, int] = {}
    for rank in range(job["ranks"]):
        if (process := os.fork()) == 0:
            _rank(job, rank, port)
        running[process] = rank
    problem = ""
    while running:
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            rank = running.pop(process)
            if status and not problem:
                problem = f"failed: rank {rank} ended with {os.waitstatus_to_exitcode(status)}"
                _kill(running)
            continue
        now = time.monotonic()
        taken += (now - looked) / crowding()
        looked = now
        if not problem and taken > job["timeout_seconds"]:
            late = f"did not end within {job['timeout_seconds']:g} s of a machine of its own"
            problem = f"{late}, on ranks {sorted(running.values())}"
            _kill(running)
        if os.getppid() != parent:
            _kill(running)
            os._exit(1)
        time.sleep(LOOK_SECONDS)
    return problem


def _kill(processes: dict[int, int]) -> None:
    for process in processes:
        os.kill(process, signal.SIGKILL)


def _rank(job: dict, rank: int, port: int) -> None:
    """Be a rank of a job, as torchrun would have started it."""
    directory = Path(job["directory"])
    status = 1
    try:
        out = os.open(directory / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), out, out)):
            os.dup2(file, number)
        size = job["ranks"]
        os.environ |= {"SPMD_TEST_DIR": str(directory), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        importlib.import_module(job["module"]).main()
        threads = len(os.listdir("/proc/self/task"))
        assert threads <= MOST_THREADS, f"{threads} threads: which process groups did not end with their layout?"
        (directory / f"done{rank}").touch()
        while rank == 0 and len(list(directory.glob("done*"))) < size:  # it has the store of them all
            time.sleep(LOOK_SECONDS)
        status = 0
    except BaseException:
        (directory / f"raised{rank}").write_text(traceback.format_exc()[-4000:])
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    from spmd_rl.platforms.cpu import CPU

    serve(CPU)
