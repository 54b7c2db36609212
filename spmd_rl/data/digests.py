"""Files that are to be found again as they were written."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

UNREADABLE = "can't be read"
"""Begins in place of the digest of a file that can't be read."""
# Below what glibc maps by itself. Once a larger block is freed, blocks of that size come from the heap, which grew by
# 0.2 MB a step of a tiny run.
_CHUNK = 1 << 16


def digest(path: Path, heard: Callable[[int], None] = lambda size: None) -> str:
    """BLAKE2b of a file's bytes, 16 bytes as hexadecimal digits. `heard`: of every so many bytes that were read."""
    found, chunk = hashlib.blake2b(digest_size=16), bytearray(_CHUNK)
    with path.open("rb", buffering=0) as stream:
        while size := stream.readinto(chunk):
            found.update(memoryview(chunk)[:size])
            heard(size)
    return found.hexdigest()


def digests_of(
    directory: Path, names: Sequence[str], heard: Callable[[int], None] = lambda size: None
) -> dict[str, str]:
    """The digests of some files of a directory; of one that can't be read, why not."""
    found = {}
    for name in names:
        try:
            found[name] = digest(directory / name, heard)
        except OSError as error:
            found[name] = f"{UNREADABLE} ({error.strerror})"
    return found
