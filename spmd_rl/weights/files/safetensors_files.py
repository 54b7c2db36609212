"""Write safetensors files part by part: the library's own writer wants all tensors of a file in memory at once."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from spmd_rl.platforms import current
from spmd_rl.weights.files.hf_reader import DTYPES, INDEX, SINGLE
from spmd_rl.weights.transfer.boxes import Box, Index

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def group_tensors(bytes_of: Mapping[str, int], max_file_bytes: int) -> dict[str, list[str]]:
    """Return file name -> tensors: in the given order, in one file, or in files of at most so many bytes."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in bytes_of.items():
        if groups[-1] and used + size > max_file_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": names for n, names in enumerate(groups, 1)}


class SafetensorsFiles:
    """Safetensors files whose headers are written first and whose tensors follow in any order, whole or in parts.

    Several processes may write to the same files: one of them calls `create`.
    """

    def __init__(
        self,
        directory: Path,
        files: Mapping[str, Sequence[str]],
        shapes: Mapping[str, Index],
        dtypes: Mapping[str, torch.dtype],
        stored: Mapping[str, str] = {},
    ) -> None:
        """`stored`: how the files call tensors that they don't call as `files` does."""
        self._stored = stored
        self._directory, self._files, self._shapes, self._dtypes = directory, files, shapes, dtypes
        self._headers: dict[str, bytes] = {}
        self._ends: dict[str, int] = {}
        self._place: dict[str, tuple[str, int]] = {}  # file, offset
        self._open: dict[str, int] = {}
        self.bytes_of = {
            name: math.prod(shapes[name]) * dtypes[name].itemsize for names in files.values() for name in names
        }
        for file, names in files.items():
            self._lay_out(file, names)

    def _lay_out(self, file: str, names: Sequence[str]) -> None:
        # Wide elements first, so that each tensor is aligned to its element size. Format: 8 bytes length of the header,
        # the header padded with spaces to 8 bytes, the tensors without gaps
        # (https://github.com/huggingface/safetensors#format).
        header: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in sorted(names, key=lambda name: -self._dtypes[name].itemsize):
            header[self._stored.get(name, name)] = {
                "dtype": _NAMES[self._dtypes[name]],
                "shape": list(self._shapes[name]),
                "data_offsets": [offset, offset + self.bytes_of[name]],
            }
            offset += self.bytes_of[name]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._headers[file] = len(text).to_bytes(8, "little") + text
        for name in names:
            self._place[name] = file, 8 + len(text) + header[self._stored.get(name, name)]["data_offsets"][0]
        self._ends[file] = 8 + len(text) + offset

    def create(self, total: Mapping[str, object] | None = None) -> None:
        """Make the files with their headers, at full length, and an index where there are several.

        `total`: what the index says of the whole model; by default its size.
        """
        for file, header in self._headers.items():
            descriptor = os.open(self._directory / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                _write_at(descriptor, header, 0)
                os.ftruncate(descriptor, self._ends[file])
            finally:
                os.close(descriptor)
        if list(self._files) != [SINGLE]:
            weight_map = {self._stored.get(name, name): file for file, names in self._files.items() for name in names}
            index = {"metadata": total or {"total_size": sum(self.bytes_of.values())}, "weight_map": weight_map}
            (self._directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def write(self, box: Box, values: torch.Tensor) -> None:
        """Put a part of a tensor where it belongs; the part's elements are neighbours in the tensor."""
        size = self._shapes[box.tensor]
        strides = [math.prod(size[d + 1 :]) for d in range(len(size))]
        first = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
        last = sum((a + n - 1) * stride for a, n, stride in zip(box.start, box.shape, strides, strict=True))
        assert last - first + 1 == box.elements, f"{box} lies scattered in {box.tensor} {size}"
        dtype = self._dtypes[box.tensor]
        values = values.to(device="cpu", dtype=dtype).contiguous()
        file, offset = self._place[box.tensor]
        if file not in self._open:
            self._open[file] = os.open(self._directory / file, os.O_WRONLY)
        if current().offloads:
            values = values.clone()  # a storage that numpy has seen can't be released any more
        data = memoryview(values.view(-1).view(torch.uint8).numpy())
        _write_at(self._open[file], data, offset + first * dtype.itemsize)

    def close(self) -> None:
        """Make sure that everything is on the disk."""
        for descriptor in self._open.values():
            os.fsync(descriptor)
            os.close(descriptor)
        self._open.clear()


def _write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + (1 << 30)], offset + done)
