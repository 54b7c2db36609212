"""Makes this rank suffer the faults that the run was asked to: each once, at the first status that fits."""

import builtins
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from spmd_rl.config.config import Config
from spmd_rl.config.fault_spec import REWARD, Fault, faults
from spmd_rl.config.names import Phase, Verb
from spmd_rl.distributed.status import RankStatus, current_status, on_status_change

FAULTS = "faults"
"""In a run's directory: what has struck, a file a rank, so that it does not strike again after a restart."""
_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
# Data files of one writer; it opens as many as it has threads.
_FILES = 8


class FaultInjector:
    """Those of one rank that have not struck yet.

    Raises ValueError, from `attach`, for a fault in a tensor that this rank has nothing of.
    """

    def __init__(self, config: Config, run_dir: Path, rank: int, restarts: int = 0):
        self.rank, self.worker = rank, None
        self._marks = Path(run_dir) / FAULTS / f"rank_{rank:05d}.txt"
        # A new run suffers anew; torchrun's restarts, and a resumed run, are the same one.
        if config.checkpoint.resume == "never" and restarts == 0:
            self._marks.unlink(missing_ok=True)
        struck = self._marks.read_text(encoding="utf-8").splitlines() if self._marks.exists() else []
        self._waiting: list[Fault] = []
        for fault in faults(config):
            if fault.text in struck:
                struck.remove(fault.text)
                print(f"inject: {fault.text} struck rank {rank} before: see {self._marks}", file=sys.stderr, flush=True)
            elif fault.rank in (None, rank):
                self._waiting.append(fault)
        self._first_fit: dict[int, float] = {}
        on_status_change(self.on_status)
        self.on_status(current_status())

    def attach(self, worker: Any) -> None:
        """Let faults break what is inside this rank from now on."""
        self.worker = worker
        for fault in self._waiting:
            if fault.param and fault.rank == self.rank and not self._pieces(fault):
                raise ValueError(
                    f"inject = {fault.text}: rank {self.rank} holds nothing of {fault.param} in {fault.side}; "
                    "name another rank, or none"
                )

    def on_status(self, status: RankStatus) -> None:
        """Strike the faults that are due at this rank's new status."""
        if status.verb == Verb.STOP:
            for fault in self._waiting:
                self._say(f"never came to where {fault.text} would strike", status=None)
            self._waiting.clear()
        for fault in [fault for fault in self._waiting if fault.fits(self.rank, status)]:
            if fault.kind in ("corrupt", "nan", "disk_full") or fault.what:
                if self.worker is not None:
                    self._strike(fault, status)
            elif fault.after and fault.kind in ("kill", "stop"):  # also while the main thread is deep in a library
                self._waiting.remove(fault)
                _later(fault.after, lambda fault=fault: self._strike(fault, current_status()))
            elif status.since - self._first_fit.setdefault(id(fault), status.since) >= fault.after:
                self._strike(fault, status)

    def _strike(self, fault: Fault, status: RankStatus) -> None:
        if fault in self._waiting:
            self._waiting.remove(fault)
        words, strike = getattr(self, f"_{fault.kind}")(fault)
        if strike is None:  # not on this rank
            return
        self._marks.parent.mkdir(parents=True, exist_ok=True)
        with self._marks.open("a", encoding="utf-8") as marks:
            marks.write(f"{fault.text}\n")
            marks.flush()
            os.fsync(marks.fileno())
        self._say(words, status)
        strike()

    def _say(self, words: str, status: RankStatus | None) -> None:
        where = ""
        if status is not None:
            verb = f" (verb {status.verb})" if status.verb else ""
            where = (
                f" in {status.phase} of step {status.step}{verb}, at {datetime.now().isoformat(' ', 'milliseconds')}"
            )
        print(f"inject: rank {self.rank} {words}{where}", file=sys.stderr, flush=True)

    # Each kind: its message, and its action; None: there is nothing to do it to.

    def _kill(self, fault: Fault) -> tuple[str, Callable[[], None] | None]:
        if fault.what == REWARD:
            return "has a grader process killed", self._kill_grader if self._graders else None
        return "kills itself (SIGKILL)", lambda: os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self, fault: Fault) -> tuple[str, Callable[[], None] | None]:
        if fault.what == REWARD:
            return "has its grader processes stopped (SIGSTOP)", self._stop_graders if self._graders else None
        return "stops itself (SIGSTOP)", lambda: os.kill(os.getpid(), signal.SIGSTOP)

    def _loop(self, fault: Fault) -> tuple[str, Callable[[], None]]:
        def loop() -> None:
            while True:
                pass

        return "loops for ever", loop

    def _slow(self, fault: Fault) -> tuple[str, Callable[[], None] | None]:
        if fault.what == REWARD:

            def slow() -> None:
                processes = self._stop_graders()
                _later(fault.seconds, lambda: _signal(processes, signal.SIGCONT))

            return f"has its grader processes stopped for {fault.seconds:g} s", slow if self._graders else None
        return f"sleeps for {fault.seconds:g} s", lambda: time.sleep(fault.seconds)

    def _raise(self, fault: Fault) -> tuple[str, Callable[[], None]]:
        kind = getattr(builtins, fault.error, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            kind = RuntimeError

        def strike() -> None:
            raise kind(fault.error if kind is RuntimeError and fault.error else f"injected by {fault.text}")

        return f"raises {kind.__name__}", strike

    def _corrupt(self, fault: Fault) -> tuple[str, Callable[[], None] | None]:
        pieces = self._pieces(fault)
        if not pieces:
            return "", None
        piece = pieces[0]
        words = f"flips bit {fault.bit} of {fault.param}{list(piece.start)}: {piece.param} of its {fault.side}"
        if fault.side == "training":
            weights = self.worker.models["policy"].weights()
            return words, lambda: _flip(weights[piece.param], piece.at, fault.bit)
        switch = self.worker.device_switch
        before = switch.on_written

        def flipped(name: str, tensor: torch.Tensor) -> None:
            if name == piece.param:
                switch.on_written = before
                _flip(tensor, piece.at, fault.bit)

        # When the refresh has written the parameter, and before it is proved.
        return words, lambda: setattr(switch, "on_written", flipped)

    def _nan(self, fault: Fault) -> tuple[str, Callable[[], None] | None]:
        trainer, rollouts = self.worker.trainer, self.worker.rollouts
        learner = "critic" if fault.phase == Phase.CRITIC_UPDATE else "policy"
        model = trainer.models[learner]
        if fault.phase == Phase.CHECKPOINT:
            name, weight = next(iter(model.weights().items()), ("", None))
            strike = None if weight is None else lambda: weight.data.view(-1)[:1].fill_(torch.nan)
            return f"makes a weight of {name} nan", strike
        if fault.phase == Phase.ROLLOUT:
            heard = rollouts.on_completion

            def broken(completion: Any) -> None:
                rollouts.on_completion = heard
                completion.sample.fields["rollout_logprobs"][:1] = torch.nan

            return "makes a log-probability of the engine nan", lambda: setattr(rollouts, "on_completion", broken)
        if fault.of == "gradient":
            name, weight = next((n, w) for n, w in model.module.named() if w.requires_grad)
            config = model.module.config
            summed = config.finalize_model_grads_func

            def poisoned(model: Any, *rest: Any, **options: Any) -> None:
                config.finalize_model_grads_func = summed
                weight.main_grad.view(-1)[:1].fill_(torch.nan)
                summed(model, *rest, **options)

            # After the backward passes, and before gradients are summed over ranks.
            return f"makes the gradient of {name} nan", lambda: setattr(config, "finalize_model_grads_func", poisoned)
        loss, left = trainer.losses[learner], [1]

        def wrong(packed: Any, said: torch.Tensor, *others: torch.Tensor) -> Any:
            trainer.losses[learner] = loss
            if left and left.pop():
                factors = torch.ones_like(said)
                factors[:1] = torch.nan
                said = said * factors
            return loss(packed, said, *others)

        return "makes a token's loss nan", lambda: trainer.losses.update({learner: wrong})

    def _disk_full(self, fault: Fault) -> tuple[str, Callable[[], None]]:
        saver = self.worker.saver
        before = saver.on_save

        def full(directory: Path) -> None:
            saver.on_save = before
            for number in range(_FILES):
                (directory / f"__{self.rank}_{number}.distcp").symlink_to("/dev/full")

        # Every write to /dev/full fails as on a full disk, in the kernel.
        return "finds no space left for what it saves", lambda: setattr(saver, "on_save", full)

    def _pieces(self, fault: Fault) -> tuple:
        training = fault.side == "training"
        shard = self.worker.models["policy"].shard if training else self.worker.device_switch.destination
        return shard.by_tensor.get(fault.param, ())

    @property
    def _graders(self) -> dict[int, int]:
        return self.worker.pool.graders

    def _stop_graders(self) -> list[int]:
        processes = list(self._graders)
        _signal(processes, signal.SIGSTOP)
        return processes

    def _kill_grader(self) -> None:
        self._stop_graders()  # so that it is seen at work

        def kill() -> None:
            while not (busy := [process for process, samples in self._graders.items() if samples]):
                time.sleep(0.01)
            _signal(busy[:1], signal.SIGKILL)
            _signal(list(self._graders), signal.SIGCONT)

        _later(0.0, kill)


def _flip(tensor: torch.Tensor, at: tuple[int, ...], bit: int) -> None:
    bits = 8 * tensor.element_size()
    mask = 1 << bit if bit < bits - 1 else -(1 << bit)
    element = tensor.detach()[at].view(_INTEGERS[tensor.dtype])
    element.bitwise_xor_(mask)


def _signal(processes: list[int], which: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, which)


def _later(seconds: float, act: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
