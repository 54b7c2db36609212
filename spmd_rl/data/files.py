"""Files that are to be found again as they were written."""

import hashlib
from pathlib import Path


def digest(path: Path) -> str:
    """BLAKE2b of a file's bytes, 16 bytes as hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
