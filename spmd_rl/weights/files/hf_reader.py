"""Read a Hugging Face directory: its headers, which are checked first, and then any slice of its tensors."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from spmd_rl.errors import ConfigError, Problem
from spmd_rl.models import FAMILIES, usual_name
from spmd_rl.models.quantized import block_size
from spmd_rl.models.weight_rows import Sizes
from spmd_rl.weights.device_memory import MAPPED_BYTES
from spmd_rl.weights.families import hf_tensors
from spmd_rl.weights.files.fp8_blocks import FP8, SCALE, blocks_of, dequantized
from spmd_rl.weights.files.weight_source import fill_shard, some
from spmd_rl.weights.transfer.boxes import Box, Index, Shard

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SCORE = "score.weight"
"""The head of a model that scores."""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""By the names that safetensors has for them."""
# Tensors that some directories hold besides the model's parameters and that say nothing new: rotary tables.
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_HARMLESS = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


@dataclass(frozen=True, slots=True)
class Header:
    """A file's word on one tensor."""

    file: Path
    shape: Index
    dtype: str
    name: str
    """As the file has it."""


def read_headers(path: str | Path, knob: str = "model.path") -> dict[str, Header]:
    """Return usual name -> header of every tensor in the directory; `knob`: the setting that names it.

    Raises ValueError naming the file that is missing or broken.
    """
    path = Path(path)
    headers: dict[str, Header] = {}
    for file in _files(path, knob):
        with _naming(file), safe_open(file, framework="pt") as handle:
            for stored in handle.keys():  # noqa: SIM118 (not a mapping)
                name = usual_name(stored)
                if name in headers:
                    met = f"{name} is in {headers[name].file.name} and in {file.name}"
                    raise ConfigError(Problem(knob, path, met, "fetch the directory again"))
                part = handle.get_slice(stored)
                headers[name] = Header(file, tuple(part.get_shape()), part.get_dtype(), stored)
    if (path / INDEX).exists():
        lost = [name for name in _weight_map(path / INDEX) if usual_name(name) not in headers]
        if lost:
            met = f"{INDEX} lists {some(lost)}, which no file holds"
            raise ConfigError(Problem(knob, path, met, "fetch the directory again"))
    return headers


class HfSource:
    """A Hugging Face directory, read slice by slice: only what is asked for; blocks of float8 become bfloat16.

    The whole directory is checked against the model's shape first. `zeros`: tensors that it lacks and that are zero.
    Raises ValueError: no directory, no safetensors, a file that is missing or broken, a tensor that is missing,
    unexpected, not floating point or of another shape.
    """

    def __init__(
        self,
        path: str | Path,
        shape: Sizes,
        zeros: Collection[str] = (),
        remap_bytes: int = MAPPED_BYTES,
        knob: str = "model.path",
    ):
        self.path = Path(path)
        self.headers = read_headers(self.path, knob)
        check_headers(self.path, self.headers, shape, knob)
        self._block = block_size(self.path)
        self._zeros = frozenset(zeros)
        self._remap_bytes = remap_bytes
        self._file: Path | None = None
        self._handle: safe_open | None = None
        self._touched = 0

    def dtype(self, tensor: str) -> torch.dtype:
        stored = self.headers["model.embed_tokens.weight" if tensor in self._zeros else tensor].dtype
        return torch.bfloat16 if stored == FP8 else DTYPES[stored]

    def copy(self, box: Box, target: torch.Tensor) -> None:
        if box.tensor in self._zeros:
            target.zero_()
            return
        header = self.headers[box.tensor]
        if header.dtype == FP8:
            assert self._block is not None and len(box.start) == 2
            scales = self.headers[box.tensor + SCALE]
            blocks = self._read(scales, blocks_of(box.start, box.shape, self._block))
            part = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
            target.copy_(dequantized(self._read(header, part), blocks, self._block, box.start))
            return
        target.copy_(self._read(header, tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))))

    def _read(self, header: Header, part: tuple[slice, ...]) -> torch.Tensor:
        with _naming(header.file):
            # The files are mapped into memory: what was read counts as this process's until they are closed.
            if self._handle is None or header.file != self._file or self._touched >= self._remap_bytes:
                self._handle = None
                self._handle, self._file, self._touched = safe_open(header.file, framework="pt"), header.file, 0
            found = self._handle.get_slice(header.name)[part]  # type: ignore[no-untyped-call]
        # A part of each row costs the pages of whole rows.
        rows = found.numel() // max(1, found.shape[-1])
        self._touched += rows * header.shape[-1] * found.element_size()
        return found


def load_shard(
    path: str | Path,
    shard: Shard,
    parameters: Mapping[str, torch.Tensor],
    shape: Sizes,
    zeros: Collection[str] = (),
) -> None:
    """Fill a shard's parameters (name -> tensor) from a directory; see HfSource and fill_shard."""
    fill_shard(HfSource(path, shape, zeros), shard, parameters)


def check_headers(path: str | Path, headers: Mapping[str, Header], shape: Sizes, knob: str = "model.path") -> None:
    """Raise ConfigError unless the tensors are those of the model: all of them, of the right shape, and no others."""

    def refused(met: str, way: str) -> ConfigError:
        return ConfigError(Problem(knob, path, met, way))

    expected = hf_tensors(shape)
    missing = [name for name in expected if name not in headers]
    if missing == [SCORE]:
        met = f"lacks {SCORE}, its score head: its config.json names a model that scores, its weights are another's"
        raise refused(met, "fetch them again, or train a head first")
    if missing:
        raise refused(f"lacks {some(missing)}", "its config.json describes another model")
    block = block_size(Path(path))
    scales = {name + SCALE for name in expected if name in headers and headers[name].dtype == FP8} if block else set()
    unexpected = [name for name in headers if name not in scales | expected.keys() and not _harmless(name, shape)]
    if unexpected:
        met = f"holds {some(unexpected)}, which a {shape.family} model as config.json describes it doesn't have"
        raise refused(met, "they would be ignored")
    for name, size in expected.items():
        header = headers[name]
        if header.shape != size:
            met = f"{name} has shape {header.shape} in {header.file.name}, its config.json means {size}"
            raise refused(met, "fetch the directory again")
        if block and header.dtype == FP8 and len(size) == 2:
            wanted = tuple(-(-length // part) for length, part in zip(size, block, strict=True))
            found = headers.get(name + SCALE)
            if found is None or found.shape != wanted or found.dtype not in DTYPES:
                met = f"{name} is {FP8} in {header.file.name}, and the scales {wanted} of its blocks are not there"
                raise refused(met, "fetch the directory again")
        elif header.dtype not in DTYPES:
            met = f"{name} is {header.dtype} in {header.file.name}, and quantized weights can't be trained"
            raise refused(met, f"use a directory with {', '.join(DTYPES)}")


def _harmless(name: str, shape: Sizes) -> bool:
    if FAMILIES[shape.family].extra_layers:
        layer = _LAYER.match(name)
        if layer and int(layer[1]) >= shape.layers:
            return True
    return bool(_HARMLESS.search(name)) or (shape.tied and name == "lm_head.weight")


def _files(path: Path, knob: str) -> list[Path]:
    if not path.is_dir():
        raise ConfigError(Problem(knob, path, "no such directory", "name a Hugging Face model directory"))
    index = path / INDEX
    if not index.exists():
        if (path / SINGLE).exists():
            return [path / SINGLE]
        others = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".safetensors"))
        held = f" (only {some(others)})" if others else ""
        raise ConfigError(Problem(knob, path, f"no {SINGLE} and no {INDEX}{held}", "save the model as safetensors"))
    names = sorted(set(_weight_map(index).values()))
    absent = [name for name in names if not (path / name).exists()]
    if absent:
        met = f"{INDEX} names {some(absent)}, not there: the download is incomplete"
        raise ConfigError(Problem(knob, path, met, "fetch them"))
    return [path / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        assert isinstance(names, dict) and all(isinstance(file, str) for file in names.values())
        return names
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise ValueError(f"{index}: not an index of safetensors files ({type(error).__name__}: {error})") from error


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
