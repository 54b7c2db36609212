"""What all tests share: tiny random models, made once."""

import pytest

from tiny_models import make_tiny
from tiny_tokenizer import make_tokenizer


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """Name -> directory of a tiny random model."""
    root = tmp_path_factory.mktemp("models")
    directories = {
        "llama": make_tiny(root / "llama", "llama"),
        "qwen2-tied": make_tiny(root / "qwen2-tied", "qwen2", tied=True),
        "qwen3": make_tiny(root / "qwen3", "qwen3"),
    }
    for directory in directories.values():
        make_tokenizer(directory)
    return {name: str(directory) for name, directory in directories.items()}
