"""What all tests share: tiny random models, made once."""

import pytest
from tiny_models import make_tiny


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """Name -> directory of a tiny random model."""
    root = tmp_path_factory.mktemp("models")
    return {
        "llama": make_tiny(root / "llama", "llama"),
        "qwen2-tied": make_tiny(root / "qwen2-tied", "qwen2", tied=True),
        "qwen3": make_tiny(root / "qwen3", "qwen3"),
    }
