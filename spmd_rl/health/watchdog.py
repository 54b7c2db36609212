"""Watches for hangs: each rank says where it is, one keeps the clock, and when it runs out all say why and leave.

Everything happens on threads of their own and through the launcher's store, so that it works while every main thread is
blocked in C. Rank 0 keeps the clock; while its own signs of life stand still, the lowest rank that lives does.
"""

import contextlib
import faulthandler
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
from spmd_rl.health.error_file import ERROR_FILE, write_error
from spmd_rl.health.hang_detector import DeadlineExceeded, HangDetector, LastSeen
from spmd_rl.health.hang_report import RankState, diagnose, report
from spmd_rl.health.heartbeat import STOPPED_SECONDS, Heartbeat, HeartbeatSource, PostMortem

HUNG = 75
"""Exit status of every rank of a run that hung: EX_TEMPFAIL, "try again later"."""

_PERIOD_SECONDS = 1.0
_QUICK_SECONDS = 0.1
_ANSWER_SECONDS = 2.5
"""So long the ranks have to write their stacks before the report is made without them."""
_STORE_SECONDS = 30.0
"""A store that answers later is asked anew."""
_CLOSE_SECONDS = 5.0
_DISK_SECONDS = 1.0
_SUSPECT_SECONDS = 2.5
"""A rank whose last beat is older is looked at from outside; it is silent when it does not answer either."""
_LOST = 1.5
"""A rank that cannot reach the store leaves by itself after so many hang.silent_seconds: later than it is reported."""

_watch: "Watchdog | None" = None


class Watchdog:
    """This rank's part. `directory`: of the run, seen by all ranks. `grading_seconds`: see Clock."""

    def __init__(
        self, config: HangConfig, world: World, directory: Path | None = None, grading_seconds: float = 0.0
    ) -> None:
        global _watch
        self.config, self.rank, self.size = config, world.rank, world.size
        self.directory = directory
        self._world_store = world.store
        self._store = self._connect()
        self._where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        self._legacy = PostMortem(signal.SIGUSR2)
        self._pulse = HeartbeatSource(self.rank, self._legacy.stacks, self._legacy.place)
        now = time.monotonic()
        self._clock = HangDetector(config, now, grading_seconds)
        self._here: set[int] = set()
        """Ranks whose first beat is in the store."""
        self._keeper = LastSeen(Heartbeat(0, -1), now)
        """What is seen of the one that keeps the clock."""
        self._answered = ""
        self._asked = ""
        self._said = ""
        self._contact = now
        self._wake = threading.Event()
        self._ended = False
        # Before anything can happen to this rank: the others look after those that they have heard of once.
        first = msgspec.json.encode(self._pulse.beat())
        self._store.set(f"beat/{self.rank}", first)
        if self.rank == 0:
            for key, value in (("clock", first), ("request", ""), ("asked", ""), ("exit", "")):
                self._store.set(key, value)
        self._threads = [
            threading.Thread(target=self._talk, daemon=True, name="hang"),
            threading.Thread(target=self._leave_when_cut_off, daemon=True, name="hang link"),
        ]
        for thread in self._threads:
            thread.start()
        _watch = self

    def close(self) -> None:
        """The run is over."""
        global _watch
        _watch = None
        self._ended = True
        self._wake.set()
        self._threads[0].join(_CLOSE_SECONDS)

    def tell(self, why: str) -> None:
        """An exchange of this rank ran into its own timeout: have the ranks reported now, and wait for what follows."""
        set_status(doing=f"{WAITS}the report: {why}")
        self._asked = f"rank {self.rank}: {why}"
        self._wake.set()
        time.sleep(2 * _PERIOD_SECONDS + 2 * _ANSWER_SECONDS)

    # The thread that talks to the store

    def _talk(self) -> None:
        while not self._ended:
            try:
                pause = self._round()
                self._contact = time.monotonic()
            except RuntimeError as error:  # the store does not answer now; the other thread knows for how long
                pause = _PERIOD_SECONDS
                self._connect_again(error)
            except Exception as error:  # a mistake in here must not end a run
                self._contact, pause = time.monotonic(), _PERIOD_SECONDS
                self._stumbled(error)
            self._wake.wait(pause)
            self._wake.clear()

    def _connect_again(self, error: Exception) -> None:
        """An answer that comes after its time would be taken for that of the next question."""
        if time.monotonic() - self._contact > 0.5 * self.config.silent_seconds:
            self._stumbled(error)
        try:
            self._store = self._connect()
        except RuntimeError as why:
            self._stumbled(why)

    def _connect(self) -> dist.Store:
        """A connection of this thread's own: what it waits for keeps nobody else waiting."""
        store = dist.PrefixStore("hang", self._world_store).clone()
        store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        return store

    def _stumbled(self, error: Exception) -> None:
        text = f"the watch for hangs stumbled: {type(error).__name__}: {error}"
        if text != self._said:
            self._said = text
            _to_stderr(f"{text}\n")

    def _round(self) -> float:
        """Say where this rank is, hear what is asked; returns the seconds until the next time."""
        store = self._store
        store.set(f"beat/{self.rank}", msgspec.json.encode(self._pulse.beat()))
        if not self._keeper.beat.process and not store.check(["exit"]):  # rank 0 has not begun
            return _QUICK_SECONDS
        clock, request, asked, leave = store.multi_get(["clock", "request", "asked", "exit"])
        self._answer(request.decode())
        if leave:
            _exit(leave.decode())
        if self._asked:
            store.set("asked", self._asked)
            asked, self._asked = self._asked.encode(), ""
        if self._is_keeper(clock):
            self._keep(asked.decode())
        return _QUICK_SECONDS if self._answered else _PERIOD_SECONDS

    def _is_keeper(self, clock: bytes) -> bool:
        """Rank 0, and in its place the lowest rank that lives while nobody keeps the clock."""
        now = time.monotonic()
        if clock:
            beat = msgspec.json.decode(clock, type=Heartbeat)
            if beat.number != self._keeper.beat.number or beat.rank != self._keeper.beat.rank:
                self._keeper = LastSeen(beat, now)
        if self.rank in (0, self._keeper.beat.rank):
            return True
        idle = self._keeper.silent_seconds(now)
        if idle < 0.5 * self.config.silent_seconds or not self._keeper.beat.process:
            return False
        self._clock.look(now, self._beats())  # see who lives
        alive = [r for r, sight in self._clock.seen.items() if sight.silent_seconds(now) < 0.25 * idle]
        if idle <= self.config.silent_seconds or not alive or min(alive) != self.rank:
            return False
        for rank in self._clock.seen.keys() - set(alive):  # this rank looks since a while only
            self._clock.seen[rank].at = min(self._clock.seen[rank].at, self._keeper.at)
        return True

    def _beats(self) -> list[Heartbeat]:
        new = [rank for rank in range(self.size) if rank not in self._here and self._store.check([f"beat/{rank}"])]
        self._here.update(new)
        found = self._store.multi_get([f"beat/{rank}" for rank in sorted(self._here)])
        return [msgspec.json.decode(one, type=Heartbeat) for one in found]

    # The keeper of the clock

    def _keep(self, asked: str) -> None:
        now = time.monotonic()
        self._store.set("clock", msgspec.json.encode(self._pulse.beat()))
        self._clock.look(now, self._beats())
        expired = self._clock.expired(now)
        if asked:
            self._store.set("asked", "")
            expired = expired or DeadlineExceeded(asked, 0.0)
        if expired is not None:
            try:
                self._report(expired, now)
            except BaseException:
                self._clock.forget()
                raise

    def _report(self, expired: DeadlineExceeded, found: float) -> None:
        """Have all ranks write their stacks, say what is wrong, and end the run if that is wanted."""
        stamp = datetime.now().strftime("%Y%m%d_%H%M%S")
        place = (self.directory or Path(tempfile.gettempdir()) / "spmd_rl") / "hang" / stamp
        if not _within(_DISK_SECONDS, lambda: place.mkdir(parents=True, exist_ok=True)):
            with contextlib.suppress(OSError):  # no disk at all: what is said on the console is left
                place = Path(tempfile.mkdtemp(prefix="spmd_rl_hang_"))
        seen = self._clock.seen
        suspects = set(expired.silent) | {r for r in seen if seen[r].silent_seconds(found) > _SUSPECT_SECONDS}
        by_machine: dict[str, list[int]] = {}
        for rank in sorted(set(seen) - suspects):
            by_machine.setdefault(seen[rank].beat.machine, []).append(rank)
        examine = [
            {"by": near[0], "beat": msgspec.to_builtins(seen[rank].beat)}
            for rank in sorted(suspects)
            if (near := by_machine.get(seen[rank].beat.machine))
        ]
        asked = set(seen) - set(expired.silent)
        answers = self._ask({"directory": str(place), "examine": examine}, asked, found + _ANSWER_SECONDS)
        told = {int(rank): told for answer in answers.values() for rank, told in answer["examined"].items()}
        silent = (suspects - set(answers)) | set(expired.silent)
        now = time.monotonic()
        standings = []
        for rank, sight in sorted(seen.items()):
            beat, still = sight.beat, sight.still_seconds(now)
            if rank in told and rank in silent:
                beat = msgspec.convert(told[rank]["beat"], Heartbeat)
                still = beat.seconds if beat.since != sight.beat.since else still
            neighbours = len(by_machine.get(beat.machine, ()))
            state = told[rank]["state"] if rank in told else None
            standings.append(RankState(beat, still, sight.silent_seconds(now), rank in silent, state, neighbours))
        verdict = diagnose(standings)
        stacks = {rank: answer["stack"] for rank, answer in told.items()}
        late = expired.late_seconds + now - found
        missing = sorted(asked - silent - {rank for rank, answer in answers.items() if answer["wrote"]})
        end = f"reported {late:.1f} s after the deadline"
        if missing:
            end += f"; {ranks_named(missing)} wrote no stacks"
        if self.config.action == "abort":
            end += f"; all ranks exit with status {HUNG}. Complete checkpoints are untouched"
        else:
            end += "; hang.action = report: the run is left as it is"
        text = report(expired.reason, standings, verdict, stacks, str(place), end)
        places = json.dumps([msgspec.to_builtins(one.beat) for one in standings], indent=1)
        _to_stderr("\n" + text + "\n")
        _within(_DISK_SECONDS, lambda: self._keep_report(text, places, place))
        if self.config.action == "abort":
            # First what can't leave by itself, and what torchrun would wait for: it ends all when the first has left.
            dead = [one for one in examine if one["beat"]["rank"] in silent]
            self._ask({"kill": dead}, {one["by"] for one in dead}, time.monotonic() + _PERIOD_SECONDS)
            why = f"hang: {expired.reason}; {'; '.join(verdict.words)}"
            self._store.set("exit", why)
            time.sleep(2 * _QUICK_SECONDS)  # for the others to be as far
            _exit(why)
        self._store.set("request", "")
        self._answered = ""

    def _ask(self, request: dict[str, Any], ranks: set[int], deadline: float) -> dict[int, dict[str, Any]]:
        """Have all ranks do something; the answers of `ranks` that came in time."""
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

    def _keep_report(self, text: str, places: str, place: Path) -> None:
        (place / "report.txt").write_text(text + "\n", encoding="utf-8")
        (place / "places.json").write_text(places, encoding="utf-8")
        if self.directory is not None and (self.directory / "run.log").exists():
            with open(self.directory / "run.log", "a", encoding="utf-8") as log:
                log.write(text + "\n")

    # Every rank

    def _answer(self, text: str) -> None:
        """Do what the keeper of the clock asks, once; say in the store that it is done."""
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
            place = Path(request["directory"])
            wrote = _within(_DISK_SECONDS, lambda: self._write_stacks(place))
            for one in request["examine"]:
                if one["by"] == self.rank:
                    beat = msgspec.convert(one["beat"], Heartbeat)
                    examined[beat.rank] = self._look_at(beat, place)
        self._store.set(f"answer/{request['id']}/{self.rank}", json.dumps({"examined": examined, "wrote": wrote}))
        self._answered = text

    def _write_stacks(self, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)  # on this node
        with open(place / _stacks_file(self.rank), "w", encoding="utf-8") as file:
            file.write(_header(self._pulse.beat()))
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _look_at(self, last: Heartbeat, place: Path) -> dict[str, Any]:
        """Look at a process of this machine that gives no sign of life."""
        state, beat, stack = procfs.state(last.process, last.begun), last, ""
        if state != procfs.GONE:
            beat = self._legacy.place_of(last)
            stack = "" if state in procfs.STOPPED else self._legacy.stacks_of(last)
        words = "\n".join(last.stack)
        now = stack or "(nothing)"
        text = f"{_header(beat)}process state {state or 'gone'}\n\nin its last beat:\n{words}\n\nnow:\n{now}\n"
        _within(_DISK_SECONDS, lambda: (place / _stacks_file(last.rank)).write_text(text, encoding="utf-8"))
        return {"state": state, "stack": stack, "beat": msgspec.to_builtins(beat)}

    # The thread that knows when the store was heard of last

    def _leave_when_cut_off(self) -> None:
        before = time.monotonic()
        while not self._ended:
            time.sleep(_PERIOD_SECONDS)
            now = time.monotonic()
            if now - before > STOPPED_SECONDS:  # this process was stopped meanwhile
                self._contact += now - before
            before = now
            late = now - self._contact - _LOST * self.config.silent_seconds
            if late > 0 and not self._ended:
                self._cut_off(late)
                return

    def _cut_off(self, late: float) -> None:
        beat = self._pulse.beat()
        why = (
            f"rank {self.rank} has not reached the launcher's store at {self._where} for "
            f"{late + _LOST * self.config.silent_seconds:.0f} s: that node is gone, or this one's link ({beat.host})"
        )
        _to_stderr(f"\nhang: {why}\n\n" + _header(beat) + "\n".join(f"  {line}" for line in beat.stack) + "\n")
        if self.config.action == "abort":
            _exit(f"hang: {why}")


def reporting_timeouts(act: Callable[..., Any]) -> Callable[..., Any]:
    """Let an exchange that runs into its own timeout end in the report of all ranks."""

    @wraps(act)
    def acting(*arguments: Any) -> Any:
        try:
            return act(*arguments)
        except RuntimeError as error:
            if _watch is not None and re.search(r"time(d )?-?out|did not arrive", str(error), re.IGNORECASE):
                _watch.tell(str(error).splitlines()[0])
            raise

    return acting


def _stacks_file(rank: int) -> str:
    return f"rank_{rank:05d}.txt"


def _header(beat: Heartbeat) -> str:
    place = ", ".join(word for word in (beat.phase, beat.verb, beat.doing) if word)
    return (
        f"rank {beat.rank} ({beat.host}, process {beat.process}): step {beat.step}, {place}, for {beat.seconds:.1f} s, "
        f"{beat.busy_seconds:.1f} s of them at work\n"
    )


def _within(seconds: float, act: Callable[[], object]) -> bool:
    """Do something with a disk or a pipe that may be what hangs; whether it was done in time."""
    done = threading.Event()

    def doing() -> None:
        try:
            act()
            done.set()
        except OSError:
            pass  # full, or another node's

    thread = threading.Thread(target=doing, daemon=True)
    thread.start()
    thread.join(seconds)
    return done.is_set()


def _to_stderr(text: str) -> None:
    """Not through sys.stderr, whose lock the main thread may hold."""
    if os.isatty(2):
        text = "\x1b[?25h" + text  # show the cursor again, which a live progress display hides
    _within(_DISK_SECONDS, lambda: os.write(2, text.encode()))


def _exit(why: str) -> None:
    # The main thread may be about to leave with an error of its own, which is not the reason.
    file = os.environ.pop(ERROR_FILE, "")
    _within(_DISK_SECONDS, lambda: write_error(why, why, file))
    procfs.end_descendants()
    os._exit(HUNG)
