"""The images of prompts on the rank that needs them: decoded there, once for all samples of a group."""

from collections.abc import Mapping, Sequence

import torch

from spmd_rl.data.image_reader import ImageReader
from spmd_rl.data.pictures import Picture
from spmd_rl.data.recently_used import RecentlyUsed
from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.distributed.sample import Sample
from spmd_rl.models import FAMILIES
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.rollout.requests import PromptImages
from spmd_rl.training.vision import ROW

_KEPT_BYTES = 1 << 28


class ImageStore:
    """Decodes the pictures of prompts, and keeps those that were used last."""

    def __init__(self, shape: ModelShape, prompts: Mapping[str, Sequence[Prompt]], reader: ImageReader | None):
        self.shape, self.prompts, self.reader = shape, prompts, reader
        self.decoded = 0
        """Prompts whose pictures were decoded."""
        self._kept = RecentlyUsed[tuple[str, int], PromptImages](_KEPT_BYTES, lambda images: images.pixels.nbytes)

    def of(self, split: str, row: int) -> PromptImages | None:
        """Return the images of a row's prompt; None where it shows none."""
        row %= len(self.prompts[split])
        prompt = self.prompts[split][row]
        if not prompt.pictures or self.reader is None:
            return None
        return self._kept.of((split, row), lambda: self._read(prompt, row))

    def pixels(self, sample: Sample) -> torch.Tensor:
        """Return the patches of a sample's images, which its rank decodes: they don't travel."""
        images = self.of("train", int(sample.fields[ROW]))
        assert images is not None
        return images.pixels

    def _read(self, prompt: Prompt, row: int) -> PromptImages:
        try:
            images = self.decode(prompt.token_ids, prompt.pictures, row)
        except (OSError, ValueError, SyntaxError) as error:
            raise ValueError(
                f"row {prompt.index} of {prompt.source}: a picture cannot be decoded: {error}; fix it, or take the "
                "row out"
            ) from error
        self.decoded += 1
        grids = tuple(images.grids)
        assert grids == prompt.grids, f"row {prompt.index}: {grids} patches, expected {prompt.grids}"
        return images

    def decode(self, token_ids: Sequence[int], pictures: Sequence[Picture], row: int = 0) -> PromptImages:
        """Return what a prompt shows, of its token ids and its pictures.

        Raises OSError, ValueError or SyntaxError where one cannot be decoded.
        """
        assert self.reader is not None and self.shape.vision is not None
        family, vision = FAMILIES[self.shape.family].vision, self.shape.vision
        assert family is not None
        pixels, grids = self.reader.patches(pictures)
        tokens = torch.tensor(token_ids)
        places = (tokens == vision.image_token).nonzero()[:, 0]
        spans, first = [], 0
        for frames, rows, columns in grids:
            count = frames * rows * columns // vision.merge**2
            spans.append((int(places[first]), count))
            first += count
        fields = {
            "positions": torch.tensor(family.positions(token_ids, grids, vision)),
            "image_places": places,
            "image_grids": torch.tensor(grids),
            ROW: torch.tensor(row),
        }
        return PromptImages(torch.from_numpy(pixels), grids, spans, fields)
