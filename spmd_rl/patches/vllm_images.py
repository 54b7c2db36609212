"""vLLM's Qwen2.5-VL without torchvision: images come to it as patches, so that it needs no more than their sizes."""

import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

_PROCESSING = "transformers.models.qwen2_vl.image_processing_"


def size_images_with_pillow(original: object) -> None:
    """Let vLLM's import of transformers' resizing find the one that needs Pillow alone."""
    if importlib.util.find_spec("torchvision") is None:
        images = sys.modules[_PROCESSING + "qwen2_vl"] = importlib.import_module(_PROCESSING + "pil_qwen2_vl")
        # By its other name, under which vLLM imports it, transformers finds the same one with a warning.
        vars(importlib.import_module("transformers.models.qwen2_vl"))["Qwen2VLImageProcessor"] = (
            images.Qwen2VLImageProcessorPil
        )


def processor_of_sizes(original: Callable) -> Callable:
    """Return, where vLLM asks for transformers' processor, no more than the settings of its images."""

    def get_hf_processor(self: Any, **options: object) -> object:
        if importlib.util.find_spec("torchvision") is not None:
            return original(self, **options)
        from transformers.processing_utils import ProcessingKwargs, VideosKwargs

        images = importlib.import_module(_PROCESSING + "pil_qwen2_vl").Qwen2VLImageProcessorPil
        found = images.from_pretrained(self.ctx.model_config.model, **options)
        return SimpleNamespace(
            image_processor=found,
            video_processor=SimpleNamespace(valid_kwargs=VideosKwargs, size=found.size),
            valid_processor_kwargs=ProcessingKwargs,
        )

    return get_hf_processor
