"""GRPO on pictures, as a user starts it: the problems of Geometry3K, a tiny model that sees, two ranks."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import RULE, tiny_rule, tiny_settings

from spmd.ranks import ROOT
from spmd_rl.analysis.compare_runs import compare
from spmd_rl.testing.launcher import environment, torchrun
from tiny_models import make_tiny
from tiny_tokenizer import make_tokenizer

pytestmark = pytest.mark.engine

STEPS, PROMPTS = 3, 4
DATA = Path(os.environ.get("SPMD_RL_TEST_DATA", ROOT.parent / "shared" / "data")) / "geo3k" / "geo3k_sample.parquet"
SETTINGS = {
    "data": {
        "source": DATA,
        "prompt_column": "problem",
        "image_column": "images",
        "max_prompt_length": 400,
        "eval_problems": 0,
    },
    "rollout": {"cache_gib": 0.05},
    "train": {"steps": STEPS, "prompts_per_step": PROMPTS, "tokens_per_microbatch": 1200, "minibatches": 2},
    "checkpoint": {"every_steps": 2, "keep_last": 9},
}


def grpo(root, name: str, *more: str) -> str:
    words = tiny_settings(root, run={"dir": root / name}, **SETTINGS)
    command = torchrun(2, "-m", "spmd_rl.grpo", *words, *tiny_rule(root), *more)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    if not DATA.is_file():
        pytest.skip("geo3k/geo3k_sample.parquet is not in SPMD_RL_TEST_DATA or ../shared/data")
    root = tmp_path_factory.mktemp("vision")
    make_tokenizer(make_tiny(root / "model", "qwen2_5_vl", max_positions=1024), vision=True)
    (root / "rule.py").write_text(RULE)
    output = grpo(root, "whole")
    rows = [json.loads(line) for line in (root / "whole" / "metrics.jsonl").read_text().splitlines()]
    return SimpleNamespace(root=root, output=output, rows=rows)


def test_prompts_show_their_pictures_and_the_policy_learns(finished):
    assert [row["step"] for row in finished.rows] == [1, 2, 3]
    for row in finished.rows:
        assert row["prompt_length/max"] > 60 and row["grad_norm"] > 0
        assert row["prompt_length/max"] <= 400
    files = sorted((finished.root / "whole" / "samples").glob("*.jsonl"))
    samples = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(samples) == STEPS * 16 and all(512 in sample["prompt_ids"] for sample in samples)


def test_a_frozen_tower_and_its_projector_are_the_same_bits_after_training(finished):
    before, after = (load_file(finished.root / name / "model.safetensors") for name in ("model", "whole/hf"))
    assert before.keys() == after.keys()
    same = {name for name, tensor in before.items() if torch.equal(tensor, after[name])}
    assert same == {name for name in before if name.startswith("visual.")}


def test_a_refresh_moves_nothing_of_a_frozen_tower_but_the_first(finished):
    tensors = load_file(finished.root / "model" / "model.safetensors")
    frozen = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith("visual."))
    moved = [sum(row[f"bytes/reshard_to_infer/{way}"] for way in ("local", "network")) for row in finished.rows]
    assert moved[0] == sum(tensor.nbytes for tensor in tensors.values())
    assert moved[1:] == [moved[0] - frozen] * (STEPS - 1)


def test_a_prompt_goes_through_the_tower_once_for_all_samples_of_its_group_and_all_passes(finished):
    # Two mini-batches: the policy scores a prompt's samples, the reference where there is one, and the policy learns.
    first, *others = [row["images/encoded"] for row in finished.rows]
    assert others == [PROMPTS] * (STEPS - 1)
    assert first == PROMPTS + 2, "and the canary's prompt, on both ranks"
    # Who generates decodes, and who trains where that is another rank.
    assert all(PROMPTS <= row["images/decoded"] <= 2 * PROMPTS + 2 for row in finished.rows)


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_one_that_never_stopped_bit_for_bit(finished):
    root = finished.root
    grpo(root, "rest", "--checkpoint.resume", str(root / "whole" / "checkpoints" / "step_000002"))
    found = compare(root / "whole", root / "rest", range(3, STEPS + 1))
    assert found.difference is None
    assert found.steps == (3, 3) and found.samples == 16
