"""Needs of a test: where the machine lacks something it is skipped, and the end of a run counts the reasons."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def need_programs(*names: str) -> None:
    if missing := [name for name in names if shutil.which(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")


@contextmanager
def small_disk(directory: Path, options: str) -> Iterator[Path]:
    """Make a file system in memory, with options of `mount` such as size=1m."""
    need_programs("mount", "umount")
    directory.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(directory)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small file system can't be mounted here: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)
