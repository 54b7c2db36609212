"""Read a Hugging Face directory into a shard: only the slices that the shard holds."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from spmd_rl.weights.families import hf_tensors
from spmd_rl.weights.families.table import Sizes
from spmd_rl.weights.transfer.boxes import Index, Shard
from spmd_rl.weights.transfer.weight_transfer import view

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")
# Tensors that some directories hold besides the model's parameters and that say nothing new: rotary tables.
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_HARMLESS = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of one tensor."""

    file: Path
    shape: Index
    dtype: str


def read_headers(path: str | Path) -> dict[str, Header]:
    """Name -> header of every tensor in the directory. Raises ValueError naming the file that is missing or broken."""
    with ExitStack() as stack:
        return _headers(Path(path), _open(Path(path), stack))


def load_shard(path: str | Path, shard: Shard, params: Mapping[str, torch.Tensor], shape: Sizes) -> int:
    """Fill a shard's parameters (name -> tensor) from the directory; returns the number of elements read.

    Values are cast to the parameter's dtype, padding is set to zero. The whole directory is checked against the model's
    shape before the first value is copied. Raises ValueError: no directory, no safetensors, a file that is missing or
    broken, a tensor that is missing, unexpected, not floating point or of another shape.
    """
    assert params.keys() >= shard.params.keys(), f"no tensor for {sorted(shard.params.keys() - params.keys())}"
    for name, size in shard.params.items():
        assert tuple(params[name].shape) == size, f"{name} is {tuple(params[name].shape)}, its shard says {size}"
    with ExitStack() as stack:
        files = _open(Path(path), stack)
        headers = _headers(Path(path), files)
        check_headers(path, headers, shape)
        with torch.no_grad():
            for name in shard.params:
                if shard.padded(name):
                    params[name].zero_()
            for piece in shard.pieces:
                file = headers[piece.tensor].file
                box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
                with _naming(file):
                    values = files[file].get_slice(piece.tensor)[box]
                view(params[piece.param], piece.at, piece.shape).copy_(values)
    return sum(piece.elements for piece in shard.pieces)


def check_headers(path: str | Path, headers: Mapping[str, Header], shape: Sizes) -> None:
    """Raise ValueError unless the tensors are those of the model: all of them, of the right shape, and no others."""
    expected = hf_tensors(shape)
    missing = [name for name in expected if name not in headers]
    if missing == ["score.weight"]:
        raise ValueError(
            f"model.path = {path}: lacks score.weight, its score head; its config.json names a model that scores, its "
            "weights are those of one that doesn't: fetch them again, or train a head first"
        )
    if missing:
        raise ValueError(f"model.path = {path}: lacks {_some(missing)}; its config.json describes another model")
    unexpected = [name for name in headers if name not in expected and not _harmless(name, shape)]
    if unexpected:
        raise ValueError(
            f"model.path = {path}: holds {_some(unexpected)}, which a {shape.family} model as config.json describes it "
            "doesn't have; they would be ignored"
        )
    for name, size in expected.items():
        header = headers[name]
        if header.shape != size:
            raise ValueError(
                f"model.path = {path}: {name} has shape {header.shape} in {header.file.name}, "
                f"its config.json means {size}"
            )
        if header.dtype not in _FLOATS:
            raise ValueError(
                f"model.path = {path}: {name} is {header.dtype} in {header.file.name}; quantized weights can't be "
                f"trained, use a directory with {', '.join(_FLOATS)}"
            )


def _harmless(name: str, shape: Sizes) -> bool:
    if shape.family == "deepseek_v3":
        # Published with a layer more than the model has, for guessing tokens ahead; transformers drops it too.
        layer = _LAYER.match(name)
        if layer and int(layer[1]) >= shape.layers:
            return True
    return bool(_HARMLESS.search(name)) or (shape.tied and name == "lm_head.weight")


def _open(path: Path, stack: ExitStack) -> dict[Path, safe_open]:
    """The directory's files, opened; each exists, is complete and has a readable header."""
    opened = {}
    for file in _files(path):
        with _naming(file):
            opened[file] = stack.enter_context(safe_open(file, framework="pt"))
    return opened


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        raise ValueError(f"model.path = {path}: no such directory")
    index = path / INDEX
    if not index.exists():
        if (path / SINGLE).exists():
            return [path / SINGLE]
        others = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".safetensors"))
        held = f" (only {_some(others)})" if others else ""
        raise ValueError(f"model.path = {path}: no {SINGLE} and no {INDEX}{held}; save the model as safetensors")
    names = sorted(set(_weight_map(index).values()))
    absent = [name for name in names if not (path / name).exists()]
    if absent:
        raise ValueError(f"model.path = {path}: {INDEX} names {_some(absent)}, not there; the download is incomplete")
    return [path / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        names = json.loads(index.read_text())["weight_map"]
        assert isinstance(names, dict) and all(isinstance(file, str) for file in names.values())
        return names
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise ValueError(f"{index}: not an index of safetensors files ({type(error).__name__}: {error})") from error


def _headers(path: Path, files: Mapping[Path, safe_open]) -> dict[str, Header]:
    headers: dict[str, Header] = {}
    for file, handle in files.items():
        for name in handle.keys():  # noqa: SIM118 (not a mapping)
            if name in headers:
                raise ValueError(f"model.path = {path}: {name} is in {headers[name].file.name} and in {file.name}")
            part = handle.get_slice(name)
            headers[name] = Header(file, tuple(part.get_shape()), part.get_dtype())
    if (path / INDEX).exists():
        lost = [name for name, file in _weight_map(path / INDEX).items() if name not in headers]
        if lost:
            raise ValueError(f"model.path = {path}: {INDEX} lists {_some(lost)}, which no file holds")
    return headers


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Say which file is broken."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file}: broken or cut off ({error}; {file.stat().st_size} bytes); fetch it again "
            "(a file of about 130 bytes is a Git LFS pointer)"
        ) from error


def _some(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
