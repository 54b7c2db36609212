"""Images in vLLM: which engine takes them, and how a request brings them."""

from spmd_rl.models.model_shape import ModelShape
from spmd_rl.rollout.requests import PromptImages


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


def with_images(prompt: list[int], images: PromptImages) -> object:
    """Return a request's input with the patches of its images, in place of pictures that vLLM would process."""
    import torch
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import (
        MultiModalFieldConfig,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    grids = torch.tensor(images.grids)
    fields = {
        "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    items = MultiModalKwargsItems.from_hf_inputs({"pixel_values": images.pixels, "image_grid_thw": grids}, fields)
    return mm_input(
        prompt,
        items,
        {"image": images.digests},
        {"image": [PlaceholderRange(offset=first, length=count) for first, count in images.spans]},
    )
