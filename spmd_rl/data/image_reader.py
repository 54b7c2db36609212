"""The door to transformers' processor of images: the patches that a model is shown of a row's pictures."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from spmd_rl.config.data_config import DataConfig
from spmd_rl.data.pictures import Picture, decode, fetched, pictures_of, size_of
from spmd_rl.data.tokens import Message
from spmd_rl.errors import ConfigError, Problem
from spmd_rl.models.blocks import Vision
from spmd_rl.models.family import Grid

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

PLACE, VIDEO = "<image>", "<video>"

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


def parts(text: str) -> list[dict[str, str]]:
    """Return a message's text in parts, as chat templates take it: text, and the places of pictures."""
    found: list[dict[str, str]] = []
    for number, piece in enumerate(text.split(PLACE)):
        found += [{"type": "image"}] if number else []
        found += [{"type": "text", "text": piece}] if piece else []
    return found
