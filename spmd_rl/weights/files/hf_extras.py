"""Keep beside a model's weights what came with them: config.json, tokenizer, in which files the tensors were."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from spmd_rl.models.model_shape import ModelShape
from spmd_rl.weights.families import hf_shard
from spmd_rl.weights.files.hf_reader import INDEX, HfSource

_FILES = "files.json"
# What belongs to a model directory besides the weights.
_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.tiktoken",
    "*.model",
    "*.py",
    "*preprocessor_config.json",
    "LICENSE*",
)


def copy_companions(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Copy config.json, tokenizer and the like; config.json then says `dtype`, unless None.

    It speaks no more of float8, which is gone once weights are read, nor of layers for the prediction of several
    tokens (num_nextn_predict_layers), which are not trained: what is written has neither.
    """
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, target / file.name)
    file = target / "config.json"
    if not file.is_file():
        return
    config = json.loads(file.read_text(encoding="utf-8"))
    changed = {key: value for key, value in config.items() if key != "quantization_config"}
    if changed.get("num_nextn_predict_layers"):
        changed["num_nextn_predict_layers"] = 0
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        changed |= {key: name for key in ("torch_dtype", "dtype") if key in config}
    if changed != config:
        file.write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")


def say_value_head(directory: Path, shape: ModelShape) -> None:
    """Make config.json that of the sequence-classification model."""
    file = directory / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config.pop("id2label", None)
    config.pop("label2id", None)
    config |= {"architectures": [shape.architecture], "num_labels": shape.labels}
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def remember_files(source: HfSource, directory: Path, shape: ModelShape) -> None:
    """Note which tensors were in which file, and what the index said of them all."""
    kept = hf_shard(shape, tied_head=shape.tied).params
    groups: dict[str, list[str]] = {}
    for name, header in source.headers.items():
        if name in kept:
            groups.setdefault(header.file.name, []).append(name)
    index = source.path / INDEX
    said = json.loads(index.read_text(encoding="utf-8")).get("metadata") if index.is_file() else None
    stored = {name: header.name for name, header in source.headers.items() if header.name != name}
    note = {"files": groups, "index": said} | ({"names": stored} if stored else {})
    (directory / _FILES).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")


def read_files(directory: Path) -> dict[str, Any] | None:
    """Return what `remember_files` noted: "files", file name -> tensors, and "index", its metadata, and "names".

    "names": how the files call tensors that have other names in some directories. None: nothing was noted. Raises
    ValueError when the note is broken.
    """
    file = directory / _FILES
    if not file.is_file():
        return None
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        for name, tensors in known["files"].items():
            assert Path(name).name == name and name.endswith(".safetensors") and isinstance(tensors, list)
        return {"files": known["files"], "index": known["index"], "names": known.get("names", {})}
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"{file}: not a list of files ({type(error).__name__}: {error}); remove it") from error
