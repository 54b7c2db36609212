"""Torchrun's environment variables, read without torch."""

import os


def size_from_environment() -> int:
    """Return the number of ranks that torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_size_from_environment() -> int:
    """Return the number of ranks on this node; 1 without torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rank_from_environment() -> int:
    """Return this process's rank; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def local_rank_from_environment() -> int:
    """Return this process's place on its node; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def restarts_from_environment() -> int:
    """Return how often torchrun has started the ranks again since its own start; 0 without torchrun."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
