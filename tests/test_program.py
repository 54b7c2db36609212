"""What the program looks at before ranks meet, asked without starting any."""

import json

import pytest

from spmd_rl.config.loading import load_config
from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.data.tokens import load_tokenizer
from spmd_rl.models.model_shape import read_model_shape
from spmd_rl.runtime.startup import Inputs, check_weights, read_inputs, refuse_unknown_tokens, start_graders
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


def test_a_token_beyond_the_models_embedding_is_refused_with_its_row_and_the_sizes(tiny_models):
    prompts = {"train": [Prompt(0, (1, 514), "", "", {}, "a"), Prompt(3, (5, 515), "", "", {}, "b.jsonl")]}
    inputs = Inputs(load_tokenizer(tiny_models["llama"]), prompts)
    refuse_unknown_tokens(inputs, 516)
    with pytest.raises(ValueError, match=r"^model: row 3 of b.jsonl"):
        refuse_unknown_tokens(inputs, 515, "model")
    with pytest.raises(ValueError, match=r"row 3 of b.jsonl has the token .* \(id 515\), .* for 515, ids 0 to 514"):
        refuse_unknown_tokens(inputs, 515)
