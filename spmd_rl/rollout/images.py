"""Images in vLLM: which engine takes them, how a request brings them, and what the engine keeps of them."""

from collections.abc import Sequence

import torch

from spmd_rl.data.recently_used import RecentlyUsed
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.rollout.requests import PromptImages

_KEPT_BYTES = 1 << 28


def image_options(shape: ModelShape, images_per_prompt: int) -> dict[str, object]:
    """Return the options of `vllm.LLM` for a model that sees; nothing for others.

    Registers the model: vLLM would else look at it in another process, which has none of the patches.
    """
    if shape.vision is None:
        return {}
    from vllm import ModelRegistry

    ModelRegistry.register_model(shape.architecture, ModelRegistry.models[shape.architecture].load_model_cls())
    return {
        "limit_mm_per_prompt": {"image": images_per_prompt, "video": 0},
        # Images come as patches: there is nothing to process, and nothing to keep of it.
        "mm_processor_cache_gb": 0,
        "mm_device_do_normalize": False,
        "skip_mm_profiling": True,
    }


class ImageFeatures:
    """Hold what an engine's vision tower makes of images, and count those that go through it.

    vLLM forgets its features when it sleeps. Those of a tower that stays as it is are kept here, on the host: each
    image goes through it by itself, so that its features have the same bits in every step, and after a resume.
    """

    def __init__(self, model: torch.nn.Module):
        """`model`: vLLM's, whose tower is counted from now on."""
        self.keep = False
        """The tower and its projector have the same weights after every refresh."""
        self.computed = 0
        """Images that went through the tower."""
        self._kept = RecentlyUsed[str, torch.Tensor](_KEPT_BYTES, lambda features: features.nbytes)
        self._tower, self._look = model.visual, model.embed_multimodal
        model.embed_multimodal = self._counted

    def of(self, images: PromptImages) -> list[torch.Tensor] | None:
        """Return the features of each image, where they are kept; None leaves it to vLLM to compute them."""
        if not self.keep:
            return None
        return [
            self._kept.of(digest, lambda pixels=pixels, grid=grid: self._features(pixels, grid))
            for digest, pixels, grid in zip(images.digests, images.of_each, images.grids, strict=True)
        ]

    @torch.inference_mode()
    def _features(self, pixels: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        device = next(self._tower.parameters()).device
        (found,) = self._counted(pixel_values=pixels.to(device), image_grid_thw=torch.tensor([grid]))
        return found.cpu()

    def _counted(self, **inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        if "pixel_values" in inputs:
            self.computed += len(inputs["image_grid_thw"])
        return self._look(**inputs)


def with_images(prompt: list[int], images: PromptImages, features: list[torch.Tensor] | None) -> object:
    """Return a request's input with the patches of its images, in place of pictures that vLLM would process.

    `features`: of each image, in place of its patches.
    """
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import (
        MultiModalFieldConfig,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    grids = torch.tensor(images.grids)
    shown, rows = ("pixel_values", images.of_each) if features is None else ("image_embeds", features)
    fields = {
        shown: MultiModalFieldConfig.flat_from_sizes("image", torch.tensor([len(one) for one in rows])),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    items = MultiModalKwargsItems.from_hf_inputs({shown: torch.cat(rows), "image_grid_thw": grids}, fields)
    return mm_input(
        prompt,
        items,
        {"image": images.digests},
        {"image": [PlaceholderRange(offset=first, length=count) for first, count in images.spans]},
    )
