"""Test what the program looks at before ranks meet, asked without starting any."""

import json
import shutil
from pathlib import Path

import pytest

from spmd_rl.config.loading import load_config
from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.data.tokens import load_tokenizer
from spmd_rl.models.model_shape import read_model_shape
from spmd_rl.program import Training
from spmd_rl.runlog.run_lock import LOCK, RunLock
from spmd_rl.runtime.process import USER_ERROR, user_errors_exit
from spmd_rl.runtime.startup import (
    Inputs,
    check_weights,
    configure,
    read_inputs,
    refuse_unknown_tokens,
    start_graders,
)
from tiny_models import make_tiny
from tiny_tokenizer import make_tokenizer


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("scorer") / "model", "llama", value_head=True, layers=1)


def configured(tiny_models, scorer, *arguments):
    argv = ["--model.path", tiny_models["llama"], "--data.arithmetic.problems", "40", "--reward.models.good.path"]
    return load_config([*argv, str(scorer), *arguments])


def test_a_reward_model_without_a_tokenizer_is_named(tiny_models, scorer):
    config = configured(tiny_models, scorer)
    with pytest.raises(ValueError, match=r"reward\.models\.good\.path = .*: there is no tokenizer in it"):
        read_inputs(config)


def test_a_reward_model_without_a_score_head_or_with_other_weights_is_named(tiny_models, scorer, tmp_path):
    config = configured(tiny_models, scorer)
    check_weights(config, read_model_shape(tiny_models["llama"]))
    other = make_tiny(tmp_path / "other", "llama", layers=1)
    described = json.loads((scorer / "config.json").read_text())
    for change, said in (
        ({}, "lacks score.weight, its score head"),
        ({"num_hidden_layers": 2}, "lacks model.layers.1"),
    ):
        (other / "config.json").write_text(json.dumps(described | change))
        with pytest.raises(ValueError, match=r"reward\.models\.good\.path = ") as caught:
            check_weights(configured(tiny_models, other), read_model_shape(tiny_models["llama"]))
        assert said in str(caught.value)


def test_a_reward_model_reads_what_its_tokenizer_lets_it(tiny_models, scorer, tmp_path):
    make_tokenizer(scorer)
    config = configured(tiny_models, scorer)
    assert read_inputs(config).readers["good"].reads == "tokens"
    config = configured(tiny_models, scorer, "--data.template", "plain")
    assert read_inputs(config).readers["good"].reads == "conversation"


def test_without_rules_there_are_no_graders(tiny_models, scorer):
    graders = start_graders(configured(tiny_models, scorer, "--reward.rules"), None, None)
    graders.submit(0, None)
    assert graders.collect(block=True) == [] and graders.busy_seconds == 0.0
    graders.close()


def cannot_start(capsys, *arguments) -> str:
    """Return what a run says that does not come to where its ranks would meet."""
    with pytest.raises(SystemExit) as left, user_errors_exit():
        short = ("--data.max_prompt_length", 120, "--rollout.max_response_length", 8, "--data.arithmetic.problems", 40)
        config, shape = configure([str(word) for word in (*short, *arguments)])
        check_weights(config, shape)
        inputs = read_inputs(config)
        start_graders(config, inputs.prompts["train"][0], inputs.tokenizer).close()
    assert left.value.code == USER_ERROR
    said = capsys.readouterr().err
    assert "spmd_rl cannot start" in said and "Traceback" not in said
    return said


def test_all_problems_of_a_configuration_are_listed_at_once(tiny_models, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    wrong = ("--parallel.tensor", 4, "--train.minibatches", 3, "--rollout.temperature", 0.0)
    text = cannot_start(capsys, "--model.path", tiny_models["qwen3"], *wrong)
    for knob in ("parallel.tensor x parallel.pipeline = 4 x 1", "train.minibatches = 3", "rollout.temperature = 0.0"):
        assert knob in text


def test_a_truncated_weight_file_is_named(tiny_models, tmp_path, capsys):
    model = Path(shutil.copytree(tiny_models["llama"], tmp_path / "model"))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert str(weights) in cannot_start(capsys, "--model.path", model)


def test_an_error_says_no_secrets(tiny_models, capsys):
    address = "https://canary-name:canary-word@example.org/rows?version=2&access_token=canary-parameter"
    text = cannot_start(capsys, "--model.path", tiny_models["llama"], "--data.source", address)
    assert "data.source = https://***@example.org/rows?version=2&access_token=***" in text and "canary" not in text


def test_a_reward_rule_that_cannot_be_imported_is_named(tiny_models, capsys):
    rules = ("--reward.rules", "no_such_module:grade", "1.0")
    assert "no_such_module" in cannot_start(capsys, "--model.path", tiny_models["llama"], *rules)


def test_a_benchmark_that_is_trained_on_is_said(tiny_models, tmp_path):
    rows = [f'{{"prompt": "What is {n}+1?", "answer": "{n + 1}"}}\n' for n in range(40)]
    for name, part in (("train", rows), ("held", rows[38:] + ['{"prompt": "New?", "answer": "1"}\n']), ("new", [])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part) or '{"prompt": "Other?", "answer": "1"}\n')
    words = ["--data.source", f"{tmp_path}/train.jsonl", "--data.eval_source", f"{tmp_path}/held.jsonl"]
    words += ["--evaluation.benchmarks", f"{tmp_path}/new.jsonl"]
    notes = read_inputs(
        load_config(["--model.path", tiny_models["llama"], "--train.prompts_per_step", "4", *words])
    ).notes
    told = [note for note in notes if note.startswith("benchmark")]
    assert told == ["benchmark held: 2 of its 3 prompts are among those that are trained on"]


def test_a_token_beyond_the_models_embedding_is_refused_with_its_row_and_the_sizes(tiny_models):
    prompts = {"train": [Prompt(0, (1, 514), "", "", {}, "a"), Prompt(3, (5, 515), "", "", {}, "b.jsonl")]}
    inputs = Inputs(load_tokenizer(tiny_models["llama"]), prompts)
    refuse_unknown_tokens(inputs, 516)
    with pytest.raises(ValueError, match=r"^model: row 3 of b.jsonl"):
        refuse_unknown_tokens(inputs, 515, "model")
    with pytest.raises(ValueError, match=r"row 3 of b.jsonl has the token .* \(id 515\), .* for 515, ids 0 to 514"):
        refuse_unknown_tokens(inputs, 515)


def test_a_signal_that_ends_a_run_gives_its_directory_back(tiny_models, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")  # which has no console
    words = [
        "--model.path",
        tiny_models["llama"],
        "--data.max_prompt_length",
        "120",
        "--run.dir",
        str(tmp_path / "run"),
    ]
    training = Training(*configure([*words, "--rollout.max_response_length", "8"]), lambda config, session: None)
    assert training.last_words() == "" and not (tmp_path / "run").exists(), "nothing is begun"
    training.lock = RunLock(tmp_path / "run", print)
    assert training.last_words() == "; no checkpoint is saved: the same command begins anew"
    assert not (tmp_path / "run" / LOCK).exists()
    RunLock(tmp_path / "run", print).release()
