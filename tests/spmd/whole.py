"""Runs the whole stack of each rank for a test, and compares vLLM's greedy answers with Hugging Face's."""

from pathlib import Path

import torch

from spmd.ranks import run_ranks

PROMPTS, SAMPLES, RESPONSE = 4, 3, 12


def case(
    model: str,
    tensor: int,
    context: int,
    pipeline: int,
    rollout: int,
    export: Path,
    *,
    flip: tuple[int, str, int] | None = None,
    **others,
) -> dict:
    """Two rounds of rollout and update in one layout, an export, and greedy answers.

    `flip`: a rank, a parameter of its engine and an element of it, which is changed during a last refresh.
    """
    config = {
        "model.path": model,
        "model.dtype": "float32",
        "parallel.tensor": tensor,
        "parallel.context": context,
        "parallel.pipeline": pipeline,
        "rollout.tensor": rollout,
        "rollout.max_response_length": RESPONSE,
        "rollout.temperature": 0.9,
        "rollout.cache_gib": 0.02,
        "rollout.max_sequences": 8,
        "data.max_prompt_length": 120,
        "data.eval_problems": 4,
        "data.arithmetic.problems": 20,
        "algorithm.samples_per_prompt": SAMPLES,
        "train.prompts_per_step": PROMPTS,
        "train.learning_rate": 1e-3,
        "train.tokens_per_microbatch": 300,
        "train.logprob_chunk_tokens": 16,
    } | others
    flags = [part for name, value in config.items() for part in (f"--{name}", *str(value).split())]
    return {"config": flags, "rounds": 2, "export": str(export), "flip": flip}


def run(ranks: int, cases: list[dict], server: str = "spmd.server", **more) -> list[list[dict]]:
    """Of each case, what each rank reports; all in one start of the ranks. `more`: as spmd/ranks.py takes it."""
    reports = run_ranks("spmd.whole_ranks", ranks, {"cases": cases} | more, server=server)
    return [[report["cases"][number] for report in reports] for number in range(len(cases))]


def check_greedy(report: dict, directory: Path, response_tokens: int) -> None:
    """vLLM's greedy answers on this rank are those of transformers with the exported weights."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    assert report["greedy"]
    for name, response in report["greedy"].items():
        prompt = report["prompts"][name]
        with torch.no_grad():
            out = hf.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=response_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        assert out[0, len(prompt) :].tolist() == response
