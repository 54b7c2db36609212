"""Say what cannot work in an evaluation or a conversation before anything starts."""

import json
from pathlib import Path

from spmd_rl.config.check_hang import hang_problems
from spmd_rl.config.check_model import engine_problems, policy_problems, positions_problems, stop_problems
from spmd_rl.config.fields import range_problems
from spmd_rl.config.serving import ChatConfig, Dtype, EvaluateConfig
from spmd_rl.config.wording import divisors
from spmd_rl.errors import Problem
from spmd_rl.models.model_shape import ModelShape

SUMMARY = "summary.json"
"""The file by which an evaluation's directory is known."""


def weights_dtype(directory: str, asked: str) -> Dtype:
    """Return the dtype to compute in; "auto" takes what config.json says, and bfloat16 for other kinds of 16 bits."""
    if asked != "auto":
        return "float32" if asked == "float32" else "bfloat16"
    content = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    said = content.get("dtype") or content.get("torch_dtype")
    return "float32" if said == "float32" else "bfloat16"


def evaluation_problems(given: EvaluateConfig, model: ModelShape, dtype: Dtype, world_size: int) -> list[Problem]:
    """Return all problems of an evaluation at once."""
    problems = range_problems(given)
    if given.samples > 1 and given.temperature == 0:
        met = "greedily (temperature = 0) all samples of a question are the same"
        problems.append(Problem("samples", given.samples, met, "set a temperature such as 0.6, or samples = 1"))
    if not given.benchmark:
        problems.append(Problem("benchmark", None, "not set", "name one with --benchmark gsm8k"))
    if given.output is not None and _in_use(Path(given.output)):
        met = "there is something already"
        problems.append(Problem("output", given.output, met, "name a directory that is new or empty"))
    engine = given.rollout
    longest = given.max_prompt_length + given.max_response_length
    if min(engine.tensor, engine.data, given.max_prompt_length, given.max_response_length) >= 1:
        if world_size % (engine.tensor * engine.data):
            way = f"their product can be {divisors(world_size)}, or start other ranks"
            met = f"does not divide the {world_size} ranks"
            value = f"{engine.tensor} x {engine.data}"
            problems.append(Problem("rollout.tensor x rollout.data", value, met, way))
        lengths = f"{given.max_prompt_length} + {given.max_response_length}"
        problems += policy_problems("model", given.model, model)
        sizes = longest, engine.data, engine.max_sequences
        problems += engine_problems(engine, engine.tensor, "rollout.tensor", model, dtype, *sizes)
        problems += positions_problems("max_prompt_length + max_response_length", lengths, longest, model)
        problems += stop_problems("stop_token_ids", given.stop_token_ids, model)
    return problems + hang_problems(given.hang)


def chat_problems(given: ChatConfig, model: ModelShape, dtype: Dtype, world_size: int) -> list[Problem]:
    """Return all problems of a conversation's settings at once."""
    if problems := range_problems(given):
        return problems
    ranks = "--nproc_per_node (tensor parallel)"
    problems = policy_problems("model", given.model, model)
    return problems + engine_problems(given, world_size, ranks, model, dtype, given.context)


def _in_use(directory: Path) -> bool:
    return directory.exists() and (not directory.is_dir() or any(directory.iterdir()))
