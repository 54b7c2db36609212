"""The door to the Hugging Face hub: models by name, downloaded once a machine; models to hand on.

huggingface_hub's own variables hold: HF_HOME and HF_HUB_CACHE (where), HF_ENDPOINT (a mirror), HF_TOKEN,
HF_HUB_OFFLINE.
"""

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from spmd_rl.errors import ConfigError, Problem

_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w./-]+))?")
_SNAPSHOT = re.compile(r".*/models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})/?")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.py", "tokenizer*", "merges.txt", "vocab*"]
_LEFT_OUT = ["*/*"]
"""Folders of a repository hold the same weights for other programs."""


def is_hub_model(path: str) -> bool:
    """Return True for owner/name or owner/name@revision, where no such directory is here, nor one called owner."""
    return not os.path.exists(path) and not os.path.isdir(path.partition("/")[0]) and bool(_NAME.fullmatch(path))


def local_directory(path: str, knob: str, weights: bool = True) -> str:
    """Return the directory of a model: its path, or where the hub's model of that name is, downloaded where it is not.

    One process of a machine downloads, the others wait for it. What is in the cache is taken without asking the hub, so
    that a run goes on from what it began with. Raises ConfigError; `knob`: the setting that names the model. `weights`
    False: without them, where they are not here.
    """
    if not is_hub_model(path):
        return path
    found = _NAME.fullmatch(path)
    assert found is not None, path
    name, revision = found["name"], found["revision"]
    from huggingface_hub import snapshot_download

    with _one_at_a_time(name):
        with contextlib.suppress(Exception):  # not in the cache, or not of this revision
            cached = snapshot_download(name, revision=revision, local_files_only=True)
            if _is_whole(Path(cached)):
                return cached
        left_out = _LEFT_OUT if weights else [*_LEFT_OUT, "*.safetensors"]
        try:
            return snapshot_download(name, revision=revision, allow_patterns=_FILES, ignore_patterns=left_out)
        except Exception as error:  # whatever a network, a proxy or a full disk makes of it
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            met = f"no directory here, and it could not be downloaded from the Hugging Face hub ({first})"
            way = (
                "check the name; set HF_ENDPOINT to a mirror, or HF_TOKEN for a model that is not public; or, where "
                f"there is a network, `hf download {name} --local-dir DIR`, and name that directory"
            )
            raise ConfigError(Problem(knob, path, met, way)) from error


def hub_name(path: str) -> str:
    """Return owner/name@commit for a model's directory in the hub's cache, which other machines find too; else path."""
    found = _SNAPSHOT.fullmatch(path)
    return f"{found[1]}/{found[2]}@{found[3]}" if found else path


def push(directory: str, name: str, private: bool = False, message: str = "Upload a model") -> str:
    """Upload a model's directory to the hub as owner/name, which is made where there is none; return its address."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        where = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=directory, commit_message=message)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(Problem("push", name, first, "log in with `hf auth login`, or set HF_TOKEN")) from error
    return str(where)


@contextlib.contextmanager
def _one_at_a_time(name: str) -> Iterator[None]:
    """Let one process of this machine in; the others wait."""
    from huggingface_hub.constants import HF_HUB_CACHE

    locks = Path(HF_HUB_CACHE) / ".locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
        lock = (locks / f"spmd_rl--{name.replace('/', '--')}.lock").open("wb")
    except OSError:  # a cache that cannot be written to is read
        yield
        return
    with lock:
        with contextlib.suppress(OSError):  # a file system without locks: the library's own are left
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_whole(directory: Path) -> bool:
    """Return True where config.json, a tokenizer and all files of weights are there."""
    index = directory / "model.safetensors.index.json"
    weights = ["model.safetensors"]
    if index.is_file():
        weights = list(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    tokenizers = ("tokenizer.json", "tokenizer.model", "vocab.json")
    return (
        (directory / "config.json").is_file()
        and all((directory / file).is_file() for file in weights)
        and any((directory / file).is_file() for file in tokenizers)
    )
