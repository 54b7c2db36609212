"""A vision tower before the decoder: transformers' own, whole on every rank of the first pipeline stage."""

import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region

from spmd_rl.distributed.sample import Sample
from spmd_rl.models import FAMILIES
from spmd_rl.models.model_shape import ModelShape

Pixels = Callable[[Sample], torch.Tensor]
"""Return the patches of a sample's images [patches, elements of a patch]."""
PROJECTOR = "merger."
"""Begins the names of a tower's parameters that turn its features into tokens of the decoder."""


def pixels_of(sample: Sample) -> torch.Tensor:
    """Return the patches that travel with a sample."""
    return sample.fields["pixel_values"]


@dataclass
class Images:
    """Hold the images of a micro-batch, each once, and where its context chunk shows their features.

    F features of all images; a chunk of C tokens shows f of them.
    """

    pixels: torch.Tensor
    """[patches, elements of a patch]."""
    grids: torch.Tensor
    """Frames, rows and columns of each image [images, 3]."""
    places: torch.Tensor
    """Index in [0, C) of each image token [f]."""
    rows: torch.Tensor
    """Index in [0, F) of what it shows [f]."""


class ImageLayout:
    """Notes the images of prompts as they are laid one after another."""

    def __init__(self, pixels: Pixels | None):
        """`pixels` None: this rank has no tower, and needs none."""
        self._pixels = pixels
        self._found: list[torch.Tensor] = []
        self._grids: list[torch.Tensor] = []
        self._places: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []
        self._features = 0

    def lay(self, sample: Sample, start: int, again: bool) -> None:
        """Note a prompt that is laid at `start`; `again`: it was laid before, for another sample of its group."""
        if self._pixels is None or "image_places" not in sample.fields:
            return
        places = sample.fields["image_places"]
        if not again:
            self._found.append(self._pixels(sample))
            self._grids.append(sample.fields["image_grids"])
            self._features += len(places)
        first = self._features - len(places)
        self._places.append(places + start)
        self._rows.append(torch.arange(first, self._features))

    def of_chunk(self, start: int, end: int, device: torch.device) -> Images | None:
        """Return the images whose features the tokens [start, end) show; None where there are none."""
        if not self._places:
            return None
        places, rows = torch.cat(self._places), torch.cat(self._rows)
        inside = (places >= start) & (places < end)
        return Images(
            pixels=torch.cat(self._found).to(device),
            grids=torch.cat(self._grids).to(device),
            places=(places[inside] - start).to(device),
            rows=rows[inside].to(device),
        )


def build_tower(shape: ModelShape, dtype: torch.dtype) -> torch.nn.Module:
    """Return the vision tower that config.json describes, uninitialised as far as its weights go."""
    family = FAMILIES[shape.family].vision
    assert family is not None and shape.vision is not None
    module, _, name = family.tower.partition(":")
    tower = getattr(importlib.import_module(module), name)
    config = tower.config_class(**json.loads(shape.vision.config))
    return tower._from_config(config, attn_implementation="sdpa", dtype=dtype)


def freeze(tower: torch.nn.Module, frozen: Sequence[str]) -> None:
    """Leave the parts named `vision` and `projector` as they are: no gradient, no optimizer state."""
    for name, parameter in tower.named_parameters():
        parameter.requires_grad_(("projector" if name.startswith(PROJECTOR) else "vision") not in frozen)


def show(hidden: torch.Tensor, tower: torch.nn.Module, images: Images | None, scatter: bool) -> torch.Tensor:
    """Put the features of images in place of their tokens' embeddings: [C, 1, H] -> [C/tp or C, 1, H].

    `scatter`: with sequence parallel, which begins here: an image may span the parts of several ranks.
    """
    if images is not None:
        trained = any(parameter.requires_grad for parameter in tower.parameters())
        with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
            pixels = images.pixels.to(next(tower.parameters()).dtype)
            features = tower(pixels, grid_thw=images.grids).pooler_output  # [F, H]
        shown = features.index_select(0, images.rows).to(hidden.dtype)
        hidden = hidden.index_copy(0, images.places, shown[:, None])
    return scatter_to_sequence_parallel_region(hidden) if scatter else hidden
