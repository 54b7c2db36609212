"""A vision tower before the decoder: transformers' own, whole on every rank of the first pipeline stage."""

import importlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region

from spmd_rl.data.recently_used import RecentlyUsed
from spmd_rl.distributed.sample import Sample
from spmd_rl.models import FAMILIES
from spmd_rl.models.model_shape import ModelShape

Pixels = Callable[[Sample], torch.Tensor]
"""Return the patches of a sample's images [patches, elements of a patch]."""
ROW = "prompt_row"
"""A sample's field: the row of the prompts to train on that it is from; what shows the same images has the same."""
_KEPT_BYTES = 1 << 28


def pixels_of(sample: Sample) -> torch.Tensor:
    """Return the patches that travel with a sample."""
    return sample.fields["pixel_values"]


@dataclass(frozen=True)
class PromptPixels:
    """Hold how to come by the images of one prompt; they are decoded where their features are missing."""

    row: int | None
    """None: of no row that is known by a number."""
    read: Callable[[], torch.Tensor]
    """Return their patches [patches, elements of a patch]."""
    grids: torch.Tensor
    """Frames, rows and columns of each [images, 3]."""


@dataclass
class Images:
    """Hold the images of a micro-batch, each once, and where its context chunk shows their features.

    F features of all images; a chunk of C tokens shows f of them.
    """

    prompts: list[PromptPixels]
    places: torch.Tensor
    """Index in [0, C) of each image token [f]."""
    rows: torch.Tensor
    """Index in [0, F) of what it shows [f]."""


class ImageLayout:
    """Notes the images of prompts as they are laid one after another."""

    def __init__(self, pixels: Pixels | None):
        """`pixels` None: this rank has no tower, and needs none."""
        self._pixels = pixels
        self._prompts: list[PromptPixels] = []
        self._places: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []
        self._features = 0

    def lay(self, sample: Sample, start: int, again: bool) -> None:
        """Note a prompt that is laid at `start`; `again`: it was laid before, for another sample of its group."""
        if self._pixels is None or "image_places" not in sample.fields:
            return
        places = sample.fields["image_places"]
        if not again:
            row = int(sample.fields[ROW]) if ROW in sample.fields else None
            self._prompts.append(PromptPixels(row, partial(self._pixels, sample), sample.fields["image_grids"]))
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
            prompts=self._prompts,
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


def is_frozen(shape: ModelShape, tensor: str, frozen: Sequence[str]) -> bool:
    """Return True for a tensor that training leaves as it is; `frozen`: as model.freeze names the parts."""
    family = FAMILIES[shape.family].vision
    return family is not None and family.part(tensor) in frozen


def freeze(tower: torch.nn.Module, shape: ModelShape, frozen: Sequence[str]) -> None:
    """Leave the frozen parts as they are: no gradient, no optimizer state."""
    for name, parameter in tower.named_parameters():
        parameter.requires_grad_(not is_frozen(shape, f"visual.{name}", frozen))


class Features:
    """Hold what a vision tower makes of images; of a frozen one the last features are kept, on the host."""

    def __init__(self) -> None:
        self.computed = 0
        """Prompts whose images went through the tower."""
        self.seconds = 0.0
        """That a frozen tower took for them; what a trained one takes is in the passes that it is part of."""
        self._kept = RecentlyUsed[int, torch.Tensor](_KEPT_BYTES, lambda features: features.nbytes)

    def of(self, tower: torch.nn.Module, prompts: Sequence[PromptPixels], device: torch.device) -> torch.Tensor:
        """Return the features of all images [F, H], on the device.

        A frozen tower looks at each prompt by itself: its features have the same bits in every micro-batch.
        """
        if any(parameter.requires_grad for parameter in tower.parameters()):
            return self._computed(tower, prompts, device)
        with torch.no_grad():
            return torch.cat([self._once(tower, prompt, device) for prompt in prompts])

    def _once(self, tower: torch.nn.Module, prompt: PromptPixels, device: torch.device) -> torch.Tensor:
        if prompt.row is None:
            return self._computed(tower, [prompt], device)
        return self._kept.of(prompt.row, lambda: self._timed(tower, prompt, device)).to(device)

    def _timed(self, tower: torch.nn.Module, prompt: PromptPixels, device: torch.device) -> torch.Tensor:
        started = time.perf_counter()
        found = self._computed(tower, [prompt], device).cpu()
        self.seconds += time.perf_counter() - started
        return found

    def _computed(self, tower: torch.nn.Module, prompts: Sequence[PromptPixels], device: torch.device) -> torch.Tensor:
        self.computed += len(prompts)
        pixels = torch.cat([prompt.read() for prompt in prompts]).to(device, next(tower.parameters()).dtype)
        return tower(pixels, grid_thw=torch.cat([prompt.grids for prompt in prompts]).to(device)).pooler_output


def show(
    hidden: torch.Tensor, tower: torch.nn.Module, features: Features, images: Images | None, scatter: bool
) -> torch.Tensor:
    """Put the features of images in place of their tokens' embeddings: [C, 1, H] -> [C/tp or C, 1, H].

    `scatter`: with sequence parallel, which begins here: an image may span the parts of several ranks.
    """
    if images is not None:
        found = features.of(tower, images.prompts, hidden.device)
        shown = found.index_select(0, images.rows).to(hidden.dtype)
        hidden = hidden.index_copy(0, images.places, shown[:, None])
    return scatter_to_sequence_parallel_region(hidden) if scatter else hidden
