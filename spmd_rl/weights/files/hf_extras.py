"""Keep beside a converted checkpoint what came with the model: config.json, and in which files the tensors were."""

import json
from pathlib import Path
from typing import Any

from spmd_rl.models.model_shape import ModelShape
from spmd_rl.weights.families import hf_shard
from spmd_rl.weights.files.export import with_head
from spmd_rl.weights.files.hf_reader import INDEX, HfSource

_FILES = "files.json"


def say_value_head(directory: Path, shape: ModelShape) -> None:
    """Make config.json that of the sequence-classification model."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config.pop("id2label", None)
    config.pop("label2id", None)
    config |= {"architectures": [shape.architecture], "num_labels": shape.labels}
    file.write_text(json.dumps(config, indent=2) + "\n")


def remember_files(source: HfSource, directory: Path, shape: ModelShape) -> None:
    """Note which tensors were in which file, and what the index said of them all."""
    kept = set(with_head(hf_shard(shape)).params if shape.tied else hf_shard(shape).params)
    groups: dict[str, list[str]] = {}
    for name, header in source.headers.items():
        if name in kept:
            groups.setdefault(header.file.name, []).append(name)
    index = source.path / INDEX
    said = json.loads(index.read_text()).get("metadata") if index.is_file() else None
    (directory / _FILES).write_text(json.dumps({"files": groups, "index": said}, indent=1) + "\n")


def read_files(directory: Path) -> dict[str, Any] | None:
    """What `remember_files` noted: "files", file name -> tensors, and "index", the index's metadata; None: nothing.

    Raises ValueError when the note is broken.
    """
    file = directory / _FILES
    if not file.is_file():
        return None
    try:
        known = json.loads(file.read_text())
        for name, tensors in known["files"].items():
            assert Path(name).name == name and name.endswith(".safetensors") and isinstance(tensors, list)
        return {"files": known["files"], "index": known["index"]}
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"{file}: not a list of files ({type(error).__name__}: {error}); remove it") from error
