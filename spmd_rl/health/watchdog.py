"""Watches for hangs: each rank says where it is, one looks at all, and past a deadline all say why and leave.

Everything happens on threads of their own and through the launcher's store, so that it works while every main thread is
blocked in C. Rank 0 monitors the run; while its own heartbeats stand still, the lowest rank that lives does.
"""

import contextlib
import json
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import wraps
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from spmd_rl.config.config import HangConfig
from spmd_rl.distributed.rank_names import ranks_named
from spmd_rl.distributed.status import WAITS, set_status
from spmd_rl.distributed.world import World
from spmd_rl.health import procfs
from spmd_rl.health.hang_detector import DeadlineExceeded, HangDetector, LastSeen
from spmd_rl.health.hang_exit import HUNG, done_in_time, exit_hung, to_stderr
from spmd_rl.health.hang_report import RankState, diagnose, report
from spmd_rl.health.heartbeat import STOPPED_SECONDS, Heartbeat, HeartbeatSource, PostMortem
from spmd_rl.health.stacks import examine, headline, write_stacks

_PERIOD_SECONDS = 1.0
_QUICK_SECONDS = 0.1
_ANSWER_SECONDS = 2.5
"""So long the ranks have to write their stacks before the report is made without them."""
_STORE_SECONDS = 30.0
"""A store that answers later is asked anew."""
_CLOSE_SECONDS = 5.0
_SUSPECT_SECONDS = 2.5
"""A rank whose last beat is older is looked at from outside; it is silent when it does not answer either."""
_CUT_OFF = 1.5
"""A rank that cannot reach the store leaves by itself after so many hang.silent_seconds: later than it is reported."""

_watchdog: "Watchdog | None" = None


class Watchdog:
    """Watch for this rank. `directory`: of the run, seen by all ranks. `grading_seconds`: see HangDetector."""

    def __init__(
        self, config: HangConfig, world: World, directory: Path | None = None, grading_seconds: float = 0.0
    ) -> None:
        global _watchdog
        self.config, self.rank, self.size = config, world.rank, world.size
        self.directory = directory
        self._world_store = world.store
        self._store = self._connect()
        self._address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        self._post_mortem = PostMortem(signal.SIGUSR2)
        self._source = HeartbeatSource(self.rank, self._post_mortem.stacks, self._post_mortem.status)
        now = time.monotonic()
        self._detector = HangDetector(config, now, grading_seconds)
        self._started: set[int] = set()
        """Ranks whose first beat is in the store."""
        self._monitor = LastSeen(Heartbeat(0, -1), now)
        """The rank that monitors the run, as last seen."""
        self._answered = ""
        self._timeout = ""
        """Of an exchange of this rank, not reported yet."""
        self._last_error = ""
        self._contact = now
        self._wake = threading.Event()
        self._ended = False
        # Before anything can happen to this rank: the others look after those that they have heard of once.
        first = msgspec.json.encode(self._source.beat())
        self._store.set(f"beat/{self.rank}", first)
        if self.rank == 0:
            for key, value in (("monitor", first), ("request", ""), ("timeout", ""), ("exit", "")):
                self._store.set(key, value)
        self._threads = [
            threading.Thread(target=self._run, daemon=True, name="hang"),
            threading.Thread(target=self._leave_when_cut_off, daemon=True, name="hang link"),
        ]
        for thread in self._threads:
            thread.start()
        _watchdog = self

    def close(self) -> None:
        """Stop watching: the run is over."""
        global _watchdog
        _watchdog = None
        self._ended = True
        self._wake.set()
        self._threads[0].join(_CLOSE_SECONDS)

    def report_timeout(self, why: str) -> None:
        """Have the ranks reported as an exchange of this rank ran into its own timeout; wait for what follows."""
        set_status(doing=f"{WAITS}the report: {why}")
        self._timeout = f"rank {self.rank}: {why}"
        self._wake.set()
        time.sleep(2 * _PERIOD_SECONDS + 2 * _ANSWER_SECONDS)

    # The thread that talks to the store

    def _run(self) -> None:
        while not self._ended:
            try:
                pause = self._round()
                self._contact = time.monotonic()
            except RuntimeError as error:  # the store does not answer now; the other thread knows for how long
                pause = _PERIOD_SECONDS
                self._connect_again(error)
            except Exception as error:  # a mistake in here must not end a run
                self._contact, pause = time.monotonic(), _PERIOD_SECONDS
                self._show_error(error)
            self._wake.wait(pause)
            self._wake.clear()

    def _connect_again(self, error: Exception) -> None:
        """Replace the connection: an answer that comes after its time would be taken for the next question's."""
        if time.monotonic() - self._contact > 0.5 * self.config.silent_seconds:
            self._show_error(error)
        try:
            self._store = self._connect()
        except RuntimeError as why:
            self._show_error(why)

    def _connect(self) -> dist.Store:
        """Open a connection of this thread's own: what it waits for keeps nobody else waiting."""
        store = dist.PrefixStore("hang", self._world_store).clone()
        store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        return store

    def _show_error(self, error: Exception) -> None:
        text = f"the watch for hangs met an error and goes on: {type(error).__name__}: {error}"
        if text != self._last_error:
            self._last_error = text
            to_stderr(f"{text}\n")

    def _round(self) -> float:
        """Send this rank's beat and do what is asked; returns the seconds until the next time."""
        store = self._store
        store.set(f"beat/{self.rank}", msgspec.json.encode(self._source.beat()))
        if not self._monitor.beat.process and not store.check(["exit"]):  # rank 0 has not begun
            return _QUICK_SECONDS
        monitor, request, timeout, leave = store.multi_get(["monitor", "request", "timeout", "exit"])
        self._answer(request.decode())
        if leave:
            exit_hung(leave.decode())
        if self._timeout:
            store.set("timeout", self._timeout)
            timeout, self._timeout = self._timeout.encode(), ""
        if self._is_monitor(monitor):
            self._check_run(timeout.decode())
        return _QUICK_SECONDS if self._answered else _PERIOD_SECONDS

    def _is_monitor(self, monitor: bytes) -> bool:
        """Return whether this rank looks at all: rank 0, and while nobody does, the lowest rank that lives."""
        now = time.monotonic()
        if monitor:
            beat = msgspec.json.decode(monitor, type=Heartbeat)
            if beat.number != self._monitor.beat.number or beat.rank != self._monitor.beat.rank:
                self._monitor = LastSeen(beat, now)
        if self.rank in (0, self._monitor.beat.rank):
            return True
        idle = self._monitor.silent_seconds(now)
        if idle < 0.5 * self.config.silent_seconds or not self._monitor.beat.process:
            return False
        seen = self._detector.seen
        self._detector.observe(now, self._beats())  # see who lives
        alive = [rank for rank, last in seen.items() if last.silent_seconds(now) < 0.25 * idle]
        if idle <= self.config.silent_seconds or not alive or min(alive) != self.rank:
            return False
        for rank in seen.keys() - set(alive):  # this rank looks since a while only
            seen[rank].at = min(seen[rank].at, self._monitor.at)
        return True

    def _beats(self) -> list[Heartbeat]:
        ranks = range(self.size)
        self._started |= {r for r in ranks if r not in self._started and self._store.check([f"beat/{r}"])}
        found = self._store.multi_get([f"beat/{rank}" for rank in sorted(self._started)])
        return [msgspec.json.decode(one, type=Heartbeat) for one in found]

    # The rank that monitors the run

    def _check_run(self, timeout: str) -> None:
        now = time.monotonic()
        self._store.set("monitor", msgspec.json.encode(self._source.beat()))
        self._detector.observe(now, self._beats())
        exceeded = self._detector.expired(now)
        if timeout:
            exceeded = exceeded or DeadlineExceeded(timeout, 0.0)
        if exceeded is not None:
            try:
                self._report(exceeded, now)
            except BaseException:
                self._detector.rearm()
                raise
        if timeout:  # only now: a report that failed is made again
            self._store.compare_set("timeout", timeout, "")

    def _report(self, exceeded: DeadlineExceeded, found: float) -> None:
        """Have all ranks write their stacks, say what is wrong, and end the run if that is wanted."""
        directory = self._report_directory()
        seen = self._detector.seen
        suspects = set(exceeded.silent) | {r for r in seen if seen[r].silent_seconds(found) > _SUSPECT_SECONDS}
        neighbours: dict[str, list[int]] = {}
        """Machine -> ranks there that send heartbeats."""
        for rank in sorted(set(seen) - suspects):
            neighbours.setdefault(seen[rank].beat.machine, []).append(rank)
        to_examine = [
            {"by": near[0], "beat": msgspec.to_builtins(seen[rank].beat)}
            for rank in sorted(suspects)
            if (near := neighbours.get(seen[rank].beat.machine))
        ]
        asked = set(seen) - set(exceeded.silent)
        answers = self._ask({"directory": str(directory), "examine": to_examine}, asked, found + _ANSWER_SECONDS)
        examined = {int(rank): one for answer in answers.values() for rank, one in answer["examined"].items()}
        silent = (suspects - set(answers)) | set(exceeded.silent)
        now = time.monotonic()
        states = self._rank_states(now, examined, silent, neighbours)
        diagnosis = diagnose(states)
        stacks = {rank: one["stack"] for rank, one in examined.items()}
        missing = asked - silent - {rank for rank, answer in answers.items() if answer["wrote"]}
        end = self._outcome(exceeded.late_seconds + now - found, missing)
        text = report(exceeded.reason, states, diagnosis, stacks, str(directory), end)
        to_stderr("\n" + text + "\n")
        done_in_time(lambda: self._keep_report(text, states, directory))
        if self.config.action == "abort":
            # First what can't leave by itself, and what torchrun would wait for: it ends all when the first has left.
            dead = [one for one in to_examine if one["beat"]["rank"] in silent]
            self._ask({"kill": dead}, {one["by"] for one in dead}, time.monotonic() + _PERIOD_SECONDS)
            reason = f"hang: {exceeded.reason}; {'; '.join(diagnosis.reasons)}"
            self._store.set("exit", reason)
            time.sleep(2 * _QUICK_SECONDS)  # for the others to be as far
            exit_hung(reason)
        self._store.set("request", "")
        self._answered = ""

    def _report_directory(self) -> Path:
        stamp = datetime.now().strftime("%Y%m%d_%H%M%S")
        directory = (self.directory or Path(tempfile.gettempdir()) / "spmd_rl") / "hang" / stamp
        if not done_in_time(lambda: directory.mkdir(parents=True, exist_ok=True)):
            with contextlib.suppress(OSError):  # no disk at all: what is said on the console is left
                directory = Path(tempfile.mkdtemp(prefix="spmd_rl_hang_"))
        return directory

    def _rank_states(
        self, now: float, examined: dict[int, dict[str, Any]], silent: set[int], neighbours: dict[str, list[int]]
    ) -> list[RankState]:
        states = []
        for rank, last in sorted(self._detector.seen.items()):
            beat, stalled = last.beat, last.stalled_seconds(now)
            if rank in examined and rank in silent:
                beat = msgspec.convert(examined[rank]["beat"], Heartbeat)
                stalled = beat.seconds if beat.since != last.beat.since else stalled
            state = examined[rank]["state"] if rank in examined else None
            near = len(neighbours.get(beat.machine, ()))
            states.append(RankState(beat, stalled, last.silent_seconds(now), rank in silent, state, near))
        return states

    def _outcome(self, late_seconds: float, missing: set[int]) -> str:
        end = f"reported {late_seconds:.1f} s after the deadline"
        if missing:
            end += f"; {ranks_named(sorted(missing))} wrote no stacks"
        if self.config.action == "abort":
            return f"{end}; all ranks exit with status {HUNG}. Complete checkpoints are untouched"
        return f"{end}; hang.action = report: the run is left as it is"

    def _ask(self, request: dict[str, Any], ranks: set[int], deadline: float) -> dict[int, dict[str, Any]]:
        """Have all ranks do something; returns the answers of `ranks` that came in time."""
        request["id"] = name = f"{self.rank} {time.monotonic()}"
        self._store.set("request", json.dumps(request))
        self._answer(json.dumps(request))
        found: dict[int, dict[str, Any]] = {}
        while True:
            for rank in sorted(ranks - set(found)):
                if self._store.check([f"answer/{name}/{rank}"]):
                    found[rank] = json.loads(self._store.get(f"answer/{name}/{rank}"))
            if len(found) == len(ranks) or time.monotonic() > deadline:
                return found
            time.sleep(_QUICK_SECONDS)

    def _keep_report(self, text: str, states: list[RankState], directory: Path) -> None:
        beats = json.dumps([msgspec.to_builtins(one.beat) for one in states], indent=1)
        (directory / "report.txt").write_text(text + "\n", encoding="utf-8")
        (directory / "places.json").write_text(beats, encoding="utf-8")
        if self.directory is not None and (self.directory / "run.log").exists():
            with open(self.directory / "run.log", "a", encoding="utf-8") as log:
                log.write(text + "\n")

    # Every rank

    def _answer(self, text: str) -> None:
        """Do what the monitoring rank asks, once; say in the store that it is done."""
        if self._answered == text:
            return
        if not text:
            self._answered = text
            return
        request = json.loads(text)
        for one in request.get("kill", ()):
            if one["by"] == self.rank:
                procfs.end_with_descendants(one["beat"]["process"], one["beat"].get("begun", 0))
        examined, wrote = {}, False
        if "directory" in request:
            directory = Path(request["directory"])
            wrote = done_in_time(lambda: write_stacks(directory, self._source.beat()))
            for one in request["examine"]:
                if one["by"] == self.rank:
                    beat = msgspec.convert(one["beat"], Heartbeat)
                    examined[beat.rank] = examine(beat, self._post_mortem, directory)
        self._store.set(f"answer/{request['id']}/{self.rank}", json.dumps({"examined": examined, "wrote": wrote}))
        self._answered = text

    # The thread that knows when the store was heard of last

    def _leave_when_cut_off(self) -> None:
        before = time.monotonic()
        while not self._ended:
            time.sleep(_PERIOD_SECONDS)
            now = time.monotonic()
            if now - before > STOPPED_SECONDS:  # this process was stopped meanwhile
                self._contact += now - before
            before = now
            limit = _CUT_OFF * self.config.silent_seconds
            if now - self._contact > limit and not self._ended:
                self._leave(now - self._contact)
                return

    def _leave(self, seconds: float) -> None:
        beat = self._source.beat()
        reason = (
            f"rank {self.rank} has not reached the launcher's store at {self._address} for {seconds:.0f} s: "
            f"that node is gone, or this one's link ({beat.host})"
        )
        to_stderr(f"\nhang: {reason}\n\n" + headline(beat) + "\n".join(f"  {line}" for line in beat.stack) + "\n")
        if self.config.action == "abort":
            exit_hung(f"hang: {reason}")


def reporting_timeouts(act: Callable[..., Any]) -> Callable[..., Any]:
    """Let an exchange that runs into its own timeout end in the report of all ranks."""

    @wraps(act)
    def acting(*arguments: Any) -> Any:
        try:
            return act(*arguments)
        except RuntimeError as error:
            if _watchdog is not None and re.search(r"time(d )?-?out|did not arrive", str(error), re.IGNORECASE):
                _watchdog.report_timeout(str(error).splitlines()[0])
            raise

    return acting
