"""Files of a report: the stacks of a rank, written by itself, or by a neighbour where it sends no heartbeat."""

import faulthandler
from pathlib import Path
from typing import Any

import msgspec

from spmd_rl.health import procfs
from spmd_rl.health.hang_exit import done_in_time
from spmd_rl.health.heartbeat import Heartbeat, PostMortem


def headline(beat: Heartbeat) -> str:
    """Say in a line where a rank is, and since when."""
    status = ", ".join(word for word in (beat.phase, beat.verb, beat.doing) if word)
    return (
        f"rank {beat.rank} ({beat.host}, process {beat.process}): step {beat.step}, {status}, "
        f"for {beat.seconds:.1f} s, {beat.busy_seconds:.1f} s of them at work\n"
    )


def write_stacks(directory: Path, beat: Heartbeat) -> None:
    """Write the stacks of all threads of this process."""
    directory.mkdir(parents=True, exist_ok=True)  # on this node
    with open(_file(directory, beat.rank), "w", encoding="utf-8") as file:
        file.write(headline(beat))
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def examine(last: Heartbeat, post_mortem: PostMortem, directory: Path) -> dict[str, Any]:
    """Look at a process of this machine that sends no heartbeat, and write what is found."""
    state, beat, stack = procfs.state(last.process, last.begun), last, ""
    if state != procfs.GONE:
        beat = post_mortem.status_of(last)
        stack = "" if state in procfs.STOPPED else post_mortem.stacks_of(last)
    words = "\n".join(last.stack)
    now = stack or "(nothing)"
    text = f"{headline(beat)}process state {state or 'gone'}\n\nin its last beat:\n{words}\n\nnow:\n{now}\n"
    done_in_time(lambda: _file(directory, last.rank).write_text(text, encoding="utf-8"))
    return {"state": state, "stack": stack, "beat": msgspec.to_builtins(beat)}


def _file(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank:05d}.txt"
