"""Pictures of a data set: where they are, what is refused of them, and their pixels as people see them."""

import base64
import hashlib
import io
import math
import re
import time
import urllib.request
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|data:")
_FETCHED = ("http://", "https://")
_CHUNK_BYTES = 1 << 16
_MOST_PIXELS = 1 << 26
"""Of a picture as it is stored: a larger one is taken for a decompression bomb."""
_ORIENTATION, _LYING = 0x0112, (5, 6, 7, 8)
"""Exif's tag of how a camera was held, and its values that change width and height."""


@dataclass(frozen=True)
class Picture:
    """Hold where a picture is: a file, or bytes that came with the row."""

    path: str = ""
    content: bytes = b""

    def read(self) -> bytes:
        """Return the file's bytes."""
        return self.content or Path(self.path).read_bytes()

    def digest(self) -> bytes:
        """Return a digest of the file's bytes."""
        return hashlib.blake2b(self.read(), digest_size=16).digest()


Fetch = Callable[[str], bytes]


def pictures_of(value: object, directory: Path, fetch: Fetch | None = None) -> list[Picture]:
    """Return the pictures of an image column's value: one or a list, each a path, bytes, or {bytes, path}.

    None and NaN, which tables of mixed data have: none. Paths are below `directory`, that of the data's file. `fetch`:
    None refuses addresses. Raises ValueError saying what is wrong with which.
    """
    some = [] if value is None or value != value else value if isinstance(value, list) else [value]
    return [_picture(one, number, directory.resolve(), fetch) for number, one in enumerate(some)]


def fetched(address: str, seconds: float, most_bytes: int) -> bytes:
    """Return what is at an address. Raises OSError or ValueError: it takes too long, is too large, or is not there."""
    ends, content = time.monotonic() + seconds, b""
    with urllib.request.urlopen(address, timeout=seconds) as reply:
        while piece := reply.read1(_CHUNK_BYTES):
            content += piece
            if len(content) > most_bytes:
                raise ValueError(f"it has more than {most_bytes} bytes (data.image_fetch_mib)")
            if time.monotonic() > ends:
                raise ValueError(f"it takes more than {seconds:g} s (data.image_fetch_seconds)")
    return content


def _picture(one: object, number: int, directory: Path, fetch: Fetch | None) -> Picture:
    which = f"picture {number}"
    if isinstance(one, dict):
        if one.get("bytes"):
            return Picture(content=one["bytes"])
        one = one.get("path")
    if isinstance(one, bytes) and one:
        return Picture(content=one)
    if not isinstance(one, str) or not one:
        raise ValueError(f"{which} is {type(one).__name__}; expected a path, bytes, or {{bytes, path}}")
    if one.startswith("data:") and ";base64," in one[:64]:
        try:
            return Picture(content=base64.b64decode(one.partition(",")[2], validate=True))
        except ValueError as error:
            raise ValueError(f"{which}, {one[:60]}, is no base64: {error}") from None
    if _URL.match(one):
        if fetch is None or not one.startswith(_FETCHED):
            raise ValueError(
                f"{which} is the address {one[:60]}, and nothing is fetched; store the picture beside the data, or set "
                "data.image_urls = fetch for http and https"
            )
        try:
            return Picture(content=fetch(one))
        except (OSError, ValueError, HTTPException) as error:
            raise ValueError(f"{which}, {one[:60]}, cannot be fetched: {error}") from error
    path = (directory / one).resolve()
    if not path.is_relative_to(directory):
        raise ValueError(f"{which}, {one}, is outside the data's directory {directory}")
    if not path.is_file():
        raise ValueError(f"{which}: there is no file {path}")
    return Picture(path=str(path))


def size_of(picture: Picture) -> tuple[int, int]:
    """Return width and height of a picture that can be shown, from its header; ValueError says what is wrong."""
    from PIL import Image, UnidentifiedImageError

    content = picture.read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            size, kind, frames = image.size, image.format, getattr(image, "n_frames", 1)
            size = size[::-1] if _orientation(image) in _LYING else size
            if math.prod(size) <= _MOST_PIXELS:
                image.verify()
        except UnidentifiedImageError:
            raise ValueError(f"it is no {', '.join(FORMATS)} picture ({len(content)} bytes)") from None
        except Image.DecompressionBombError as error:
            raise ValueError(f"it is too large: {error}") from None
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(f"it is broken or cut off: {error}") from None
    if math.prod(size) > _MOST_PIXELS:
        raise ValueError(f"it has {size[0]} x {size[1]} pixels, more than {_MOST_PIXELS} in all")
    if frames > 1 and kind != "MPO":  # phones put a small copy behind a JPEG
        raise ValueError(f"it is animated, with {frames} frames")
    if _cut_off(content, str(kind)):
        raise ValueError("it is broken or cut off: its end is missing")
    width, height = size
    if min(size) < 2 or max(size) / min(size) > 200:
        raise ValueError(f"it has {width} x {height} pixels; a side is at least 2, and at most 200 times the other")
    return size


def _cut_off(content: bytes, kind: str) -> bool:
    """Look for the end of a file, which reading its header doesn't; PNG was looked through already."""
    from PIL import Image

    if kind == "WEBP":
        return len(content) < 8 + int.from_bytes(content[4:8], "little")
    if kind == "PNG" or b"\xff\xd9" in content[-1024:]:
        return False
    if b"\xff\xd9" not in content:
        return True
    try:  # phones put more behind a JPEG's end
        Image.open(io.BytesIO(content), formats=FORMATS).load()
    except (OSError, SyntaxError, ValueError):
        return True
    return False


def _orientation(image: "Image") -> int:
    """Return how a camera was held: Exif's number, of a picture that is not decoded; 1 where nothing says it."""
    from PIL import Image as pillow

    try:  # PNG's own would decode it, to find what stands behind its pixels
        return int(pillow.Image.getexif(image).get(_ORIENTATION, 1))
    except Exception:  # what is broken there says nothing
        return 1


def thumbnail(picture: Picture, side: int = 96) -> str:
    """Return a small copy of a picture as an address that pages show: data:image/jpeg;base64,..."""
    shown, written = decode(picture), io.BytesIO()
    shown.thumbnail((side, side))
    shown.save(written, "JPEG", quality=70)
    return "data:image/jpeg;base64," + base64.b64encode(written.getvalue()).decode()


def decode(picture: Picture) -> "Image":
    """Return a picture's pixels as people see them: RGB, upright, of 8 bits, and white where it is transparent."""
    from PIL import Image

    turns = dict(zip(range(2, 9), (0, 3, 1, 5, 4, 6, 2), strict=True))  # Exif's number -> Image.Transpose
    with Image.open(io.BytesIO(picture.read()), formats=FORMATS) as image:
        turn = turns.get(_orientation(image))
        if image.mode.startswith("I"):  # Pillow would make all but the darkest 256 of its 65,536 greys white
            shown = image.convert("I").point(lambda grey: grey * (1 / 256)).convert("L").convert("RGB")
        elif image.has_transparency_data:
            shown = Image.new("RGBA", image.size, "white")
            shown.alpha_composite(image.convert("RGBA"))
            shown = shown.convert("RGB")
        else:
            shown = image.convert("RGB")
    return shown if turn is None else shown.transpose(Image.Transpose(turn))


def write_picture(picture: Picture, directory: Path) -> Path:
    """Write a picture into a directory, named by its bytes: one that is shown twice is there once. Returns the file."""
    content = picture.read()
    kinds = {b"\x89PNG": ".png", b"RIFF": ".webp"}
    file = directory / f"{picture.digest().hex()}{kinds.get(content[:4], '.jpg')}"
    if not (file.is_file() and file.read_bytes() == content):
        partial = file.with_name(file.name + ".partial")
        partial.write_bytes(content)
        partial.replace(file)
    return file
