"""Load an engine that nothing trains, from a Hugging Face directory or a checkpoint, one parameter at a time."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from spmd_rl.models.weight_rows import Sizes
from spmd_rl.weights.files.checkpoint_reader import CheckpointSource, is_checkpoint
from spmd_rl.weights.files.hf_reader import HfSource
from spmd_rl.weights.files.weight_source import Source, fill_shard
from spmd_rl.weights.transfer.boxes import Shard


def open_source(path: str, shape: Sizes, knob: str = "model") -> Source:
    """Open the weights in a directory, whose headers are checked; `knob`: the setting that names it.

    Raises ValueError: broken, or not of this shape.
    """
    return CheckpointSource(path, shape) if is_checkpoint(Path(path)) else HfSource(path, shape, knob=knob)


def fill_engine(
    source: Source, shard: Shard, parameters: Mapping[str, torch.Tensor], written: Callable[[str], None]
) -> None:
    """Fill an engine's parameters; `written` hears of each that is complete, before the next one is looked up."""
    for name, size in shard.params.items():
        fill_shard(source, Shard({name: size}, shard.by_param[name]), {name: parameters[name]})
        written(name)
