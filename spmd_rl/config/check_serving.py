"""What cannot work in an evaluation or a conversation, said before anything starts."""

import json
import math
import re
from pathlib import Path
from typing import Literal

from spmd_rl.config.check import hang_problems
from spmd_rl.config.check_model import model_problems
from spmd_rl.config.config import Config
from spmd_rl.config.serving import ChatConfig, EvaluateConfig
from spmd_rl.config.wording import divisors
from spmd_rl.errors import ConfigError
from spmd_rl.models.model_shape import ModelShape

SUMMARY = "summary.json"
"""The file by which an evaluation's directory is known."""
MOST_SAMPLES = 1024
"""Binomial coefficients of more do not fit a float, in which majority@k is computed."""

# What a run's configuration calls the settings of these programs.
_RENAMED = re.compile(
    r"\b(?:model\.path|model\.trust_remote_code|data\.(?=max_|overlong|template|system|enable_thinking)"
    r"|rollout\.(?=max_resp|stop))"
)


def in_own_words(message: str, chat: bool = False) -> str:
    """A message about a run's settings, in the words of these programs."""
    if chat:
        for long, short in (
            ("data.max_prompt_length + rollout.max_response_length", "context"),
            ("rollout.tensor", "--nproc_per_node (tensor parallel)"),
            ("rollout.", ""),
        ):
            message = message.replace(long, short)
        message = re.sub(r"context = (\d+) \+ 1\b", lambda found: f"context = {int(found[1]) + 1}", message)
    words = {"model.path": "model", "model.trust_remote_code": "trust_remote_code"}
    return _RENAMED.sub(lambda found: words.get(found[0], ""), message)


def config_directory(knob: str, path: str) -> str:
    """Where the config.json and the tokenizer of a model are: a Hugging Face directory itself, or hf/ in a checkpoint.

    Raises ConfigError when it is neither.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(f"{knob} = {path}: there is no such directory; name a Hugging Face directory or a checkpoint")
    if (directory / "config.json").is_file():
        return path
    if not (directory / "metadata.json").is_file():
        raise ConfigError(
            f"{knob} = {path}: it has neither config.json (a Hugging Face directory) nor metadata.json (a Megatron "
            "checkpoint); name one of these"
        )
    if not (directory / "hf" / "config.json").is_file():
        raise ConfigError(
            f"{knob} = {path}: a checkpoint without hf/config.json; put the model's config.json and tokenizer into "
            f"{directory / 'hf'}, as tools/convert_checkpoint.py does"
        )
    return str(directory / "hf")


def weights_dtype(directory: str, asked: str) -> Literal["float32", "bfloat16"]:
    """The dtype to compute in; "auto" takes what config.json says, and bfloat16 for other kinds of 16 bits."""
    if asked != "auto":
        return "float32" if asked == "float32" else "bfloat16"
    content = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    said = content.get("dtype") or content.get("torch_dtype")
    return "float32" if said == "float32" else "bfloat16"


def evaluation_problems(given: EvaluateConfig, config: Config, model: ModelShape, world_size: int) -> list[str]:
    """All problems of an evaluation at once."""
    problems = _sampling_problems(given)
    positive = {
        "samples": given.samples,
        "max_prompt_length": given.max_prompt_length,
        "max_response_length": given.max_response_length,
        "grader_workers": given.grader_workers,
        **_engine_sizes(given),
    }
    problems += _below_one(positive | ({} if given.limit is None else {"limit": given.limit}))
    if given.samples > MOST_SAMPLES:
        problems.append(f"samples = {given.samples}: out of range; it must be at most {MOST_SAMPLES}")
    if given.samples > 1 and given.temperature == 0:
        problems.append(
            f"samples = {given.samples}: greedily (temperature = 0) all samples of a question are the same; set a "
            "temperature such as 0.6, or samples = 1"
        )
    for knob, seconds in (
        ("grader_timeout_seconds", given.grader_timeout_seconds),
        ("control_timeout_seconds", given.control_timeout_seconds),
    ):
        if not seconds > 0:
            problems.append(f"{knob} = {seconds}: out of range; it must be above 0")
    if not given.benchmark:
        problems.append("benchmark: not set; name what to ask with --benchmark configs/datasets/gsm8k.yaml")
    if given.output is not None and _in_use(Path(given.output)):
        problems.append(f"output = {given.output}: there is something already; name a directory that is new or empty")
    if min(positive.values()) >= 1:
        engine = given.rollout
        if world_size % (engine.tensor * engine.data):
            problems.append(
                f"rollout.tensor x rollout.data = {engine.tensor} x {engine.data}: does not divide the {world_size} "
                f"ranks; their product can be {divisors(world_size)}, or start other ranks"
            )
        problems += [in_own_words(problem) for problem in model_problems(config, model)]
    return problems + hang_problems(given.hang)


def chat_problems(given: ChatConfig, config: Config, model: ModelShape) -> list[str]:
    """All problems of a conversation's settings at once."""
    problems = _sampling_problems(given)
    sizes = {"max_tokens": given.max_tokens, "block_tokens": given.block_tokens}
    problems += _below_one(sizes)
    if given.context < 2:
        problems.append(f"context = {given.context}: out of range; it must be 2 or more")
    if not given.cache_gib > 0:
        problems.append(f"cache_gib = {given.cache_gib}: out of range; it must be above 0")
    if not problems:
        problems += [in_own_words(problem, chat=True) for problem in model_problems(config, model)]
    return problems


SAMPLING = {
    "temperature": ("0 (greedy) or more", lambda value: value >= 0),
    "top_p": ("above 0 and at most 1 (1: all tokens)", lambda value: 0 < value <= 1),
    "top_k": ("0 (all tokens) or more", lambda value: value >= 0),
    "min_p": ("at least 0 (0: all tokens) and below 1", lambda value: 0 <= value < 1),
}
"""Sampling setting -> what it must be, in words and as a test."""


def _sampling_problems(given: EvaluateConfig | ChatConfig) -> list[str]:
    found = {knob: getattr(given, knob) for knob in SAMPLING}
    problems = [
        f"{knob} = {value}: out of range; it must be {SAMPLING[knob][0]}"
        for knob, value in found.items()
        if not (math.isfinite(value) and SAMPLING[knob][1](value))
    ]
    if given.seed < 0:
        problems.append(f"seed = {given.seed}: out of range; it must be 0 or more")
    return problems


def _below_one(sizes: dict[str, int]) -> list[str]:
    return [f"{knob} = {value}: out of range; it must be 1 or more" for knob, value in sizes.items() if value < 1]


def _engine_sizes(given: EvaluateConfig) -> dict[str, int]:
    names = ("tensor", "data", "max_sequences", "block_tokens")
    return {f"rollout.{name}": getattr(given.rollout, name) for name in names}


def _in_use(directory: Path) -> bool:
    return directory.exists() and (not directory.is_dir() or any(directory.iterdir()))
