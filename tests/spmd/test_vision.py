"""GRPO on pictures, as a user starts it: the problems of Geometry3K, a tiny model that sees, two ranks."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import RULE, tiny_rule, tiny_settings

from deadlines import crowding
from promised import documented
from spmd.ranks import ROOT, run_program
from spmd_rl.analysis.compare_runs import compare
from spmd_rl.testing.launcher import environment
from tiny_models import make_tiny
from tiny_tokenizer import make_tokenizer

pytestmark = pytest.mark.engine

STEPS, PROMPTS, IMAGE_TOKEN = 3, 4, 512
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


def grpo(root, name: str, *more: str, **sections: dict) -> Path:
    """Run two ranks, with other settings of some sections; returns the run's directory."""
    words = tiny_settings(root, run={"dir": root / name}, **(SETTINGS | sections))
    run_program("spmd_rl.grpo", 2, *words, *tiny_rule(root), *more)
    return root / name


def lines(files) -> list[dict]:
    return [json.loads(line) for file in sorted(files) for line in file.read_text().splitlines()]


def metrics(run: Path) -> list[dict]:
    return lines([run / "metrics.jsonl"])


def samples(run: Path) -> list[dict]:
    return lines((run / "samples").glob("*.jsonl"))


def like_to_write(model: Path, token: int) -> None:
    """Make a token one that the model samples often."""
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"][token] *= 10
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    if not DATA.is_file():
        pytest.skip("geo3k/geo3k_sample.parquet is not in SPMD_RL_TEST_DATA or ../shared/data")
    root = tmp_path_factory.mktemp("vision")
    make_tokenizer(make_tiny(root / "model", "qwen2_5_vl", max_positions=1024), vision=True)
    (root / "rule.py").write_text(RULE)
    (root / "geo.yaml").write_text(f"source: {DATA}\nprompt_column: problem\nimage_column: images\n")
    return SimpleNamespace(root=root, rows=metrics(grpo(root, "whole")))


@pytest.fixture(scope="module")
def mixed(finished):
    """Return a function that trains all of the model on text, beside pictures or alone; it runs each name once."""
    sources = {"both": {finished.root / "geo.yaml": 1.0, "arithmetic": 1.0}, "text": {"arithmetic": 1.0}}

    def run(name: str, *more: str, called: str = "") -> Path:
        mix = [str(word) for source, weight in sources[name].items() for word in (source, weight)]
        bare = {"max_prompt_length": 400, "eval_problems": 0}
        return grpo(finished.root, called or name, "--model.freeze", "none", *more, "--data.mix", *mix, data=bare)

    return cache(run)


def test_prompts_show_their_pictures_and_the_policy_learns(finished):
    assert [row["step"] for row in finished.rows] == [1, 2, 3]
    for row in finished.rows:
        assert row["prompt_length/max"] > 60 and row["grad_norm"] > 0
        assert row["prompt_length/max"] <= 400
        assert documented("grpo", "pictures") - row.keys() == set()
        assert 40 < row["prompt_length/image_mean"] < row["prompt_length/mean"]
        assert 0 < row["timing/image_embeds"] < row["timing/all"]
    found = samples(finished.root / "whole")
    assert len(found) == STEPS * 16 and all(IMAGE_TOKEN in sample["prompt_ids"] for sample in found)
    assert sum("thumbnails" in sample for sample in found) == STEPS * PROMPTS, "with the first sample of each prompt"


def test_samples_travel_to_where_they_are_trained_on_and_their_pictures_do_not(finished):
    for row in finished.rows:
        patches = row["prompt_length/image_mean"] * 4 * 1176  # numbers of them, in fp32, for a prompt
        assert row["bytes/exchange/network"] < patches * 4


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
    assert [row["images/encoded_rollout"] for row in finished.rows] == [PROMPTS + 2, *[PROMPTS] * (STEPS - 1)]
    # Who generates decodes, and who trains where that is another rank.
    assert all(PROMPTS <= row["images/decoded"] <= 2 * PROMPTS + 2 for row in finished.rows)


@pytest.mark.slow
def test_a_run_that_goes_on_is_the_one_that_never_stopped_bit_for_bit(finished):
    root = finished.root
    grpo(root, "rest", "--checkpoint.resume", str(root / "whole" / "checkpoints" / "step_000002"))
    found = compare(root / "whole", root / "rest", range(3, STEPS + 1))
    assert found.difference is None
    assert found.steps == (3, 3) and found.samples == 16


@pytest.mark.slow
def test_an_image_token_in_a_response_is_a_token_like_any_other(finished, tmp_path):
    shutil.copytree(finished.root / "model", tmp_path / "model")
    like_to_write(tmp_path / "model", IMAGE_TOKEN)
    (tmp_path / "rule.py").write_text(RULE)
    run = grpo(tmp_path, "whole")
    assert sum(IMAGE_TOKEN in sample["response_ids"][:-1] for sample in samples(run)) > 5
    rows = metrics(run)
    assert len(rows) == STEPS and all(row["correction/logprob_gap_max"] < 1e-4 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("both", [False, True], ids=["text alone", "text and pictures"])
def test_text_trains_a_model_that_sees_alone_and_beside_pictures_its_tower_too(finished, mixed, both):
    run = mixed("both" if both else "text")
    rows, seeing = metrics(run), [IMAGE_TOKEN in sample["prompt_ids"] for sample in samples(run)]
    assert len(rows) == STEPS and not all(seeing) and any(seeing) == both
    assert all(row["grad_norm"] > 0 and row["correction/logprob_gap_max"] < 1e-4 for row in rows)
    before, after = (load_file(directory / "model.safetensors") for directory in (finished.root / "model", run / "hf"))
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert any(key.startswith("visual.") for key in changed) == both


@pytest.mark.slow
def test_a_tower_that_learns_has_the_same_bits_in_a_run_that_is_deterministic_and_in_one_that_need_not_ask(mixed):
    found = compare(mixed("both"), mixed("both", "--run.deterministic", "True", called="again"))
    assert found.difference is None
    assert found.steps == (1, STEPS) and found.samples == STEPS * 16


@pytest.mark.slow
def test_all_samples_of_geometry3k_are_prepared_answered_judged_and_learned_from(finished):
    root, tool = finished.root, ROOT / "tools" / "preprocess_data.py"
    words = ["--config", root / "geo.yaml", "--model", root / "model", "--max-prompt-length", 400, "--workers", 1]
    command = [sys.executable, tool, *words, "--output", root / "geo.parquet"]
    subprocess.run(
        list(map(str, command)), env=environment(), check=True, capture_output=True, timeout=300 * crowding()
    )
    data = {"source": root / "geo.parquet", "max_prompt_length": 400, "eval_problems": 0}
    train = SETTINGS["train"] | {"prompts_per_step": 48 // STEPS}
    run = grpo(root, "all", data=data, train=train, algorithm={"samples_per_prompt": 2})
    found = samples(run)
    assert Counter(sample["index"] for sample in found) == dict.fromkeys(range(48), 2)
    assert all("reward" in sample and sample["response_ids"] for sample in found)
    prompts = {sample["index"]: sample["prompt_ids"] for sample in found}
    assert all(raw["prompt_ids"] == prompts[raw["index"]] for raw in samples(root / "whole"))
    rows = metrics(run)
    assert sum(row["images/encoded"] for row in rows) == 48 + 1, "each once, the canary's prompt on the other rank too"
    assert all(row["grad_norm"] > 0 for row in rows)


@pytest.mark.slow
def test_an_evaluation_shows_pictures_to_the_model_and_to_who_reads_its_page(finished):
    root = finished.root
    words = [
        "--model",
        root / "whole" / "hf",
        "--benchmark",
        root / "geo.yaml",
        "--limit",
        3,
        "--output",
        root / "eval",
    ]
    words += ["--max-prompt-length", 400, "--max-response-length", 6, "--rollout.cache-gib", 0.05, "--platform", "cpu"]
    said = run_program("spmd_rl.evaluate", 1, *words)
    assert f"questions with their pictures  {root / 'eval' / 'geo.html'}" in said
    answers = lines([root / "eval" / "geo.jsonl"])
    assert len(answers) == 3 and all(line["thumbnails"][0].startswith("data:image/jpeg") for line in answers)
    assert (root / "eval" / "geo.html").read_text().count("<img") == 3


@pytest.mark.slow
def test_a_chat_shows_a_picture_and_answers_as_transformers_does(tmp_path):
    from PIL import Image
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    make_tokenizer(make_tiny(tmp_path, "qwen2_5_vl"), vision=True)
    Image.new("RGB", (84, 56), "red").save(tmp_path / "red.png")
    typed = f"/image {tmp_path / 'red.png'}\nWhich colour?\n/exit\n"
    words = ["--model", tmp_path, "--temperature", 0, "--max-tokens", 8, "--context", 200, "--cache-gib", 0.05]
    command = [sys.executable, "-m", "spmd_rl.chat", *map(str, words), "--platform", "cpu"]
    told = {"env": environment(), "cwd": ROOT, "input": typed, "timeout": 300 * crowding()}
    said = subprocess.run(command, capture_output=True, text=True, check=True, **told).stdout
    assert "84 x 56 pixels, is shown with your next question" in said
    tokenizer, shown = AutoTokenizer.from_pretrained(tmp_path), Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    pixels = shown([Image.open(tmp_path / "red.png")], return_tensors="pt")
    content = [{"type": "image"}, {"type": "text", "text": "Which colour?"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    count = int(pixels["image_grid_thw"].prod()) // 4
    text = text.replace("<|image_pad|>", "<|image_pad|>" * count)
    prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32)
    types = (prompt == IMAGE_TOKEN).int()
    with torch.no_grad():
        out = model.generate(prompt, **pixels, mm_token_type_ids=types, max_new_tokens=8, do_sample=False)
    answer = tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True)
    assert answer in said
