"""Test what evaluate and chat refuse, all of it at once and before anything starts, in their own words."""

import json
import shutil

import pytest

from spmd_rl import evaluate
from spmd_rl.chat import __main__ as chat
from spmd_rl.config.check_serving import weights_dtype
from spmd_rl.config.loading import dump, load
from spmd_rl.config.serving import ChatConfig, EvaluateConfig

DEMO = "configs/datasets/arithmetic_demo.yaml"


def refused(command, *words) -> str:
    with pytest.raises(ValueError) as caught:
        command.configure([str(word) for word in words])
    return str(caught.value)


def test_all_problems_of_an_evaluation_are_listed_at_once(tiny_models, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    words = ["--model", tiny_models["llama"], "--n", "4", "--top-p", "2", "--limit", "0", "--seed", "-1"]
    words += ["--rollout.tensor", "2", "--max-response-length", "9999", "--stop-token-ids", "5000"]
    words += ["--benchmark", "nowhere.yaml", "--output", tmp_path / "full", "--baseline", tmp_path]
    said = refused(evaluate, *words)
    for what in (
        "samples = 4: greedily (temperature = 0) all samples of a question are the same",
        "top_p = 2.0: out of range",
        "limit = 0: out of range",
        "seed = -1: out of range",
        "does not divide the 1 ranks",
        "max_prompt_length + max_response_length = 1024 + 9999: the model has 512 positions",
        "stop_token_ids = 5000: 5000 is not in the model's vocabulary",
        "benchmark = nowhere.yaml: ",
        "full: there is something already",
        f"baseline = {tmp_path}: it has neither config.json",
    ):
        assert what in said, said
    assert "data.max" not in said and "rollout.max" not in said and "model.path" not in said


def test_settings_are_strict_and_the_nearest_name_is_given(tiny_models):
    assert "modle: there is no such setting; did you mean model?" in refused(evaluate, "--modle", "x")
    assert "model: not set" in refused(evaluate, "--benchmark", DEMO)
    assert "benchmark: not set" in refused(evaluate, "--model", tiny_models["llama"], "--max-prompt-length", "100")
    assert "rollout: a section" in refused(evaluate, "--model", "x", "--rollout", "2")
    assert "max_tokens = many: expected a whole number" in refused(chat, "--model", "x", "--max_tokens", "many")


@pytest.mark.parametrize("command", [evaluate, chat])
def test_a_directory_that_is_no_model_says_what_it_lacks(command, tiny_models, tmp_path):
    benchmark = ["--benchmark", DEMO] if command is evaluate else []
    assert "model = nowhere: there is no such directory" in refused(command, "--model", "nowhere", *benchmark)
    assert "neither config.json" in refused(command, "--model", tmp_path, *benchmark)
    (tmp_path / "metadata.json").touch()
    assert "a checkpoint without hf/config.json" in refused(command, "--model", tmp_path, *benchmark)
    broken = shutil.copytree(tiny_models["llama"], tmp_path / "broken")
    (broken / "config.json").write_text("{")
    assert f"model = {broken}: config.json is not valid JSON" in refused(command, "--model", broken, *benchmark)


def test_a_second_model_of_another_shape_is_sent_away_with_advice(tiny_models):
    words = ["--model", tiny_models["llama"], "--baseline", tiny_models["qwen3"], "--benchmark", DEMO]
    said = refused(evaluate, *words, "--max-prompt-length", 100, "--max-response-length", 100)
    assert said.startswith(f"baseline = {tiny_models['qwen3']}: a Qwen3ForCausalLM") and "evaluate it by itself" in said


def test_an_earlier_evaluation_of_something_else_is_no_baseline(tiny_models, tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "gsm8k.jsonl").write_text("")
    words = ["--model", tiny_models["llama"], "--benchmark", DEMO, "--baseline", tmp_path]
    said = refused(evaluate, *words, "--max-prompt-length", 100, "--max-response-length", 100)
    assert said == f"baseline = {tmp_path}: it has no arithmetic_demo.jsonl; it evaluated gsm8k"
    (tmp_path / "arithmetic_demo.jsonl").write_text('{"index": 1}\n')
    assert "is not what an evaluation writes" in refused(
        evaluate, *words, "--max-prompt-length", 100, "--max-response-length", 100
    )


def test_a_chat_is_refused_what_its_model_cannot_do(tiny_models, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    said = refused(chat, "--model", tiny_models["llama"])
    assert "--nproc_per_node (tensor parallel) = 3: the model has 4 attention heads" in said
    monkeypatch.setenv("WORLD_SIZE", "1")
    said = refused(chat, "--model", tiny_models["llama"], "--temperature", "-1", "--cache-gib", "0", "--context", "1")
    for what in ("temperature = -1.0: out of range", "cache_gib = 0.0: out of range", "context = 1: out of range"):
        assert what in said
    said = refused(chat, "--model", tiny_models["llama"], "--cache-gib", "0.0001")
    assert said.startswith("cache_gib = 0.0001: one sample of 512 tokens takes")


def test_a_context_beyond_the_models_positions_is_the_models(tiny_models):
    assert chat.configure(["--model", tiny_models["llama"]]).settings.context == 512


@pytest.mark.parametrize("said, dtype", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "bfloat16")])
def test_weights_are_computed_with_as_config_json_says(tmp_path, said, dtype):
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": said}))
    assert weights_dtype(str(tmp_path), "auto") == dtype
    assert weights_dtype(str(tmp_path), "float32") == "float32"


def test_settings_may_stand_in_a_file(tmp_path):
    for given in (EvaluateConfig("m", benchmark=("a.yaml",), samples=4), ChatConfig("m", system="Be brief.")):
        (tmp_path / "settings.yaml").write_text(dump(given))
        assert load(type(given), ["--config", str(tmp_path / "settings.yaml")], {}, "") == given


def test_the_demos_evaluation_is_what_the_demo_itself_evaluates():
    from spmd_rl.config.data_config import ArithmeticConfig
    from spmd_rl.config.loading import load_config, load_dataset_config

    demo = load_config(["--config", "configs/demo_smollm2_cpu.yaml"])
    given = load(EvaluateConfig, ["--config", "configs/evaluation/demo_smollm2_cpu.yaml"], {}, "")
    options = load_dataset_config(given.benchmark[0]).options
    assert (options.pop("problems"), given.limit) == (demo.data.eval_problems, None)
    spec = ArithmeticConfig(**options | {"operations": tuple(options["operations"])}, problems=2000)
    assert spec == demo.data.arithmetic
    assert given.seed == demo.run.seed
    assert given.max_response_length == demo.rollout.max_response_length
    assert given.max_prompt_length == demo.data.max_prompt_length
    assert (given.samples, given.temperature, given.grader) == (1, 0.0, *demo.reward.rules)
