"""Where weights can be read from, slice by slice: a Hugging Face directory, or a Megatron checkpoint of any layout."""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from spmd_rl.weights.families.table import Sizes
from spmd_rl.weights.files.checkpoint_files import Checkpoint
from spmd_rl.weights.files.checkpoint_layout import by_tensor, checkpoint_shard, chunks_of
from spmd_rl.weights.files.hf_reader import check_headers, read_headers
from spmd_rl.weights.transfer.boxes import Box, Piece, Shard, split
from spmd_rl.weights.transfer.weight_transfer import view

_MODEL = ("decoder.", "embedding.", "output_layer.", "value_head.")
_NAMES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Source(Protocol):
    """A model's weights under their Hugging Face names."""

    def dtype(self, tensor: str) -> torch.dtype:
        """As stored."""
        ...

    def copy(self, box: Box, target: torch.Tensor) -> None:
        """Fill a tensor of the box's shape, cast to its dtype. Raises ValueError when the file is broken."""
        ...


class HfSource:
    """A Hugging Face directory, read slice by slice.

    `zeros`: tensors that the directory lacks and that are zero. Raises ValueError when the directory isn't complete,
    or not of this shape.
    """

    def __init__(self, path: str | Path, shape: Sizes, zeros: Collection[str] = (), remap_bytes: int = 64 << 20):
        self.path = Path(path)
        self.headers = read_headers(self.path)
        check_headers(self.path, self.headers, shape)
        self._zeros = frozenset(zeros)
        self._remap_bytes = remap_bytes
        self._file: Path | None = None
        self._handle: safe_open | None = None
        self._touched = 0

    def dtype(self, tensor: str) -> torch.dtype:
        if tensor in self._zeros:
            return self.dtype("model.embed_tokens.weight")
        return _NAMES[self.headers[tensor].dtype]

    def copy(self, box: Box, target: torch.Tensor) -> None:
        if box.tensor in self._zeros:
            target.zero_()
            return
        file = self.headers[box.tensor].file
        try:
            # The files are mapped into memory: what was read counts as this process's until they are closed.
            if self._handle is None or file != self._file or self._touched >= self._remap_bytes:
                self._handle = None
                self._handle, self._file, self._touched = safe_open(file, framework="pt"), file, 0
            part = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
            target.copy_(self._handle.get_slice(box.tensor)[part])
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: {box} can't be read ({error})") from error
        # A part of each row costs the pages of whole rows.
        rows = box.elements // box.shape[-1] if box.shape else 1
        self._touched += rows * self.headers[box.tensor].shape[-1] * target.element_size()


class CheckpointSource:
    """A Megatron checkpoint, converted or saved by training, as the model that `shape` describes.

    Raises ValueError naming the first keys when the checkpoint is of another model.
    """

    def __init__(self, path: str | Path, shape: Sizes, cache_bytes: int = 128 << 20):
        self.checkpoint = Checkpoint(path, cache_bytes)
        self._whole = checkpoint_shard(shape)
        self._pieces = by_tensor(self._whole)
        check_checkpoint(self.checkpoint, self._whole, shape)

    def dtype(self, tensor: str) -> torch.dtype:
        return self.checkpoint.dtypes[self._pieces_of(tensor)[0].param]

    def copy(self, box: Box, target: torch.Tensor) -> None:
        pieces = self._pieces_of(box.tensor)
        for part, at in chunks_of(box._replace(tensor=pieces[0].tensor), pieces):
            shape = part.shape[len(part.shape) - len(box.shape) :]
            self.checkpoint.copy(part, view(target, at, shape).view(part.shape))

    def _pieces_of(self, tensor: str) -> list[Piece]:
        # A tied model's head is its embedding.
        tied = tensor == "lm_head.weight" and tensor not in self._pieces
        return self._pieces["model.embed_tokens.weight" if tied else tensor]


def check_checkpoint(checkpoint: Checkpoint, whole: Shard, shape: Sizes) -> None:
    """Raise ValueError unless a checkpoint has a model's tensors, of the right shapes, and no others of a model."""
    held = {key: size for key, size in checkpoint.sizes.items() if key.startswith(_MODEL)}
    missing = [key for key in whole.params if key not in held]
    unexpected = [key for key in held if key not in whole.params]
    what = f"{checkpoint.path}: not a {shape.family} model of {shape.layers} layers as its config.json describes it"
    if any(key.startswith("decoder.layers.") and not key.split(".")[2].isdigit() for key in held):
        raise ValueError(
            f"{checkpoint.path}: its layers are stacked in one tensor ({_some(unexpected)}); "
            "save it with sharded_state_dict(metadata={'non_homogeneous_layers': True})"
        )
    if missing or unexpected:
        lacks = [f"it lacks {_some(missing)}"] if missing else []
        has = [f"it has {_some(unexpected)}"] if unexpected else []
        raise ValueError(f"{what}: {' and '.join(lacks + has)}")
    for key, size in whole.params.items():
        found = held[key]
        padded = key in ("embedding.word_embeddings.weight", "output_layer.weight")
        if found != size and not (padded and found[1:] == size[1:] and found[0] > size[0]):
            raise ValueError(f"{what}: {key} has shape {found}, config.json means {size}")
        if not checkpoint.dtypes[key].is_floating_point:
            raise ValueError(f"{what}: {key} is {checkpoint.dtypes[key]}")


def fill_shard(source: Source, shard: Shard, params: Mapping[str, torch.Tensor]) -> None:
    """Fill a shard's parameters (name -> tensor), cast to their dtype; padding is set to zero.

    The same as load_shard, from any source: a training start or an engine's from a Megatron checkpoint.
    """
    with torch.no_grad():
        for name in shard.params:
            if shard.padded(name):
                params[name].zero_()
        for piece in shard.pieces:
            source.copy(piece.box, view(params[piece.param], piece.at, piece.shape))


def first_difference(
    a: Source,
    b: Source,
    boxes: Iterable[Box],
    dtypes: Mapping[str, torch.dtype],
    most_elements: int,
    compared: Callable[[int], None] = lambda more: None,
) -> str | None:
    """The first element in which two sources differ, after a cast to these dtypes, bit for bit; None: nowhere.

    `compared` hears of the bytes of each slice that is the same.
    """
    for box in boxes:
        for part in split(box, most_elements):
            left = torch.empty(part.shape, dtype=dtypes[part.tensor])
            right = torch.empty_like(left)
            a.copy(part, left)
            b.copy(part, right)
            whole = _INTEGERS[left.element_size()]
            unequal = left.view(whole) != right.view(whole)
            if unequal.any():
                at = tuple(int(n) for n in unequal.nonzero()[0])
                where = ", ".join(str(n + first) for n, first in zip(at, part.start, strict=True))
                return (
                    f"{part.tensor}[{where}] is {left[at].item()!r} in the source and {right[at].item()!r} in what was "
                    f"written; {int(unequal.sum())} elements of {part} differ"
                )
            compared(left.nbytes)
    return None


def _some(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
