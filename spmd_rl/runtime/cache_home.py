"""Have libraries cache in a place that can be written: vLLM and W&B fill the console with what they could not keep."""

import atexit
import os
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

_CACHE, _HUB = "XDG_CACHE_HOME", "HF_HOME"


def use_writable_cache(environment: MutableMapping[str, str] = os.environ) -> list[str]:
    """Name a new directory in XDG_CACHE_HOME where the user's own cannot be written; return what to say of it.

    What is there of the Hugging Face hub is read from where it is.
    """
    own = Path(environment.get(_CACHE) or Path(environment.get("HOME") or Path.home()) / ".cache")
    place = next(path for path in (own, *own.absolute().parents) if path.exists())
    if os.access(place, os.W_OK | os.X_OK):
        return []
    environment.setdefault(_HUB, str(own / "huggingface"))
    environment[_CACHE] = tempfile.mkdtemp(prefix="spmd_rl_cache_")
    atexit.register(shutil.rmtree, environment[_CACHE], ignore_errors=True)
    return [f"{_CACHE} = {environment[_CACHE]}, as {own} cannot be written: what libraries cache is lost with this run"]
