"""The door to pictures: which files of a data set are read, what is refused, and the patches that a model is shown."""

import base64
import hashlib
import io
import math
import re
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from spmd_rl.config.data_config import DataConfig
from spmd_rl.data.tokens import Message
from spmd_rl.errors import ConfigError, Problem
from spmd_rl.models.blocks import Vision
from spmd_rl.models.family import Grid

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP")
PLACE, VIDEO = "<image>", "<video>"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|data:")
_FETCHED = ("http://", "https://")
_CHUNK_BYTES = 1 << 16
_MOST_PIXELS = 1 << 26
"""Of a picture as it is stored: a larger one is taken for a decompression bomb."""


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
Shown = tuple[str | list[Message], tuple[Picture, ...], tuple[Grid, ...]]
"""Of a row: what the template takes, its pictures, the grid of each."""


class Processor(Protocol):
    """Stand for transformers' processor of images."""

    size: dict[str, int]
    """shortest_edge and longest_edge: the limits of a picture's pixels."""

    def __call__(self, images: Sequence["Image"], /, **options: str) -> "Mapping[str, np.ndarray]": ...


class ImageReader:
    """Reads the pictures of rows, as one model is shown them."""

    def __init__(self, model: str, vision: Vision, data: DataConfig):
        """Read the settings of the model's directory, beside which Pillow alone is needed."""
        if not (Path(model) / "preprocessor_config.json").is_file():
            met = "there is no preprocessor_config.json in it, which says how pictures are shown to the model"
            raise ConfigError(Problem("model.path", model, met, "copy the file of the model there"))
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        limits = {"min_pixels": data.image_min_pixels, "max_pixels": data.image_max_pixels}
        given = {name: value for name, value in limits.items() if value is not None}
        self.processor: Processor = Qwen2VLImageProcessorPil.from_pretrained(model, local_files_only=True, **given)
        least, most = (self.processor.size[edge] for edge in ("shortest_edge", "longest_edge"))
        if least > most:
            knob = "image_min_pixels" if data.image_min_pixels is not None else "image_max_pixels"
            met = f"a picture would have at least {least} pixels and at most {most}; the model's own are in {model}"
            raise ConfigError(Problem(f"{data.prefix}{knob}", getattr(data, knob), met, "set both"))
        self.vision, self.most = vision, data.images_per_prompt
        self.fetch = partial(fetched, seconds=data.image_fetch_seconds, most_bytes=int(data.image_fetch_mib * 2**20))
        self.fetches = data.image_urls == "fetch"
        self.limit = f"{data.prefix}images_per_prompt = {self.most}"

    def row(self, content: str | list[Message], value: object, file: str) -> Shown:
        """Return a row's messages in parts, its pictures and their grids, decoding none; ValueError: what is wrong.

        `value`: of its image column; `file`: the row's.
        """
        if isinstance(content, str):
            raise ValueError("data.template = plain has no place for pictures; use a chat template")
        if any(VIDEO in message["content"] for message in content):
            raise ValueError(f"its prompt says {VIDEO}, and no videos are shown; show pictures of it")
        places = sum(message["content"].count(PLACE) for message in content)
        directory = Path(file).parent if Path(file).is_file() else Path(file)
        pictures = pictures_of(value, directory, self.fetch if self.fetches else None)
        if len(pictures) != places:
            raise ValueError(f"it has {len(pictures)} pictures, and its prompt says {PLACE} {places} times")
        grids = self.grids(pictures)
        if pictures:
            content = [message | {"content": parts(message["content"])} for message in content]
        return content, tuple(pictures), grids

    def grids(self, pictures: Sequence[Picture]) -> tuple[Grid, ...]:
        """Return the patches that each picture of a row becomes, decoding none; ValueError: what is wrong."""
        if len(pictures) > self.most:
            raise ValueError(f"it has {len(pictures)} pictures, more than {self.limit}")
        found = []
        for number, picture in enumerate(pictures):
            try:
                found.append(self.grid(*size_of(picture)))
            except ValueError as error:
                raise ValueError(f"picture {number}{f', {picture.path}' if picture.path else ''}: {error}") from error
        return tuple(found)

    def grid(self, width: int, height: int) -> Grid:
        """Return the patches that a picture of this size becomes."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        unit, size = self.vision.patch * self.vision.merge, self.processor.size
        sides = smart_resize(height, width, unit, size["shortest_edge"], size["longest_edge"])
        rows, columns = (side // self.vision.patch for side in sides)
        return 1, rows, columns

    def expanded(self, token_ids: Sequence[int], grids: Sequence[Grid]) -> list[int]:
        """Return a prompt with as many image tokens as each picture has features, in place of one for each.

        Raises ValueError where the template did not write one for each.
        """
        token, found = self.vision.image_token, list[int]()
        if (written := list(token_ids).count(token)) != len(grids):
            raise ValueError(f"the template writes {written} image tokens for {len(grids)} pictures")
        left = iter(grids)
        for one in token_ids:
            found += [token] * (math.prod(next(left)) // self.vision.merge**2) if one == token else [one]
        return found

    def patches(self, pictures: Sequence[Picture]) -> "tuple[np.ndarray, list[Grid]]":
        """Decode pictures; returns their patches [patches, numbers of a patch], one's after another's, and grids."""
        shown = self.processor([decode(picture) for picture in pictures], return_tensors="np")
        return shown["pixel_values"], [tuple(grid) for grid in shown["image_grid_thw"].tolist()]


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


def parts(text: str) -> list[dict[str, str]]:
    """Return a message's text in parts, as chat templates take it: text, and the places of pictures."""
    found: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(PLACE)):
        found += [{"type": "image"}] if number else []
        found += [{"type": "text", "text": piece}] if piece else []
    return found


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
    """Return width and height of a picture that can be shown, decoding nothing; ValueError says what is wrong."""
    import warnings

    from PIL import Image, UnidentifiedImageError

    content = picture.read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(content), formats=FORMATS)
            size, kind, frames = image.size, image.format, getattr(image, "n_frames", 1)
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
    if frames > 1:
        raise ValueError(f"it is animated, with {frames} frames")
    if _cut_off(content, str(kind)):
        raise ValueError("it is broken or cut off: its end is missing")
    width, height = size
    if min(size) < 2 or max(size) / min(size) > 200:
        raise ValueError(f"it has {width} x {height} pixels; a side is at least 2, and at most 200 times the other")
    return size


def _cut_off(content: bytes, kind: str) -> bool:
    """Look for the end of a file, which reading its header doesn't; PNG was looked through already."""
    if kind == "JPEG":
        return b"\xff\xd9" not in content[-1024:]
    if kind == "WEBP":
        return len(content) < 8 + int.from_bytes(content[4:8], "little")
    return False


def thumbnail(picture: Picture, side: int = 96) -> str:
    """Return a small copy of a picture as an address that pages show: data:image/jpeg;base64,..."""
    shown, written = decode(picture), io.BytesIO()
    shown.thumbnail((side, side))
    shown.save(written, "JPEG", quality=70)
    return "data:image/jpeg;base64," + base64.b64encode(written.getvalue()).decode()


def decode(picture: Picture) -> "Image":
    """Return a picture's pixels, RGB."""
    from PIL import Image

    with Image.open(io.BytesIO(picture.read()), formats=FORMATS) as image:
        return image.convert("RGB")
