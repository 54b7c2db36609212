"""An engine of a tiny model, or of one that is named, by itself on one device."""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from spmd_rl.models.model_shape import read_model_shape
from spmd_rl.rollout.options import model_options
from tools.bringup.outcome import device_here

CACHE_BYTES = 1 << 28


def model_of_command_line() -> str:
    """Return the directory that --model names, or a tiny random model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    if named := parser.parse_args().model:
        return named
    from tests.tiny_models import make_tiny

    return str(make_tiny(Path(tempfile.mkdtemp()) / "model", "qwen2", heads=2, kv_heads=2))


def start(model: str, **options: Any) -> Any:
    """Return vLLM's LLM with the options of this machine; `options` replace some."""
    machine = device_here()
    from spmd_rl.patches import vllm as patches
    from spmd_rl.patches.patch import apply_all

    apply_all(patches.PATCHES, machine.patches)
    from vllm import LLM

    for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29571"), ("RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("LOCAL_RANK", "0")
    own = model_options(model, read_model_shape(model), 32, machine)
    given = {"max_model_len": 512, "max_num_seqs": 64, "kv_cache_memory_bytes": CACHE_BYTES, "load_format": "dummy"}
    given |= {"skip_tokenizer_init": True, "distributed_executor_backend": "external_launcher", "dtype": "bfloat16"}
    return LLM(model, **(given | own | options))


def seconds_of(llm: Any, count: int, tokens: int, seeds: bool) -> float:
    """Return the time of so many answers of so many tokens."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=[5 + n % 7] * 16) for n in range(count)]
    sampling = [
        SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, seed=n if seeds else None)
        for n in range(count)
    ]
    began = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False)
    return time.perf_counter() - began
