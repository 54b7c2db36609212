"""The door to tokenizers."""

import json
import os
from pathlib import Path

import pytest

from spmd_rl.config.config import Config, ModelConfig
from spmd_rl.config.data_config import DataConfig
from spmd_rl.data import tokens
from spmd_rl.data.sources.prompts import load_prompts
from spmd_rl.data.tokens import decode, encode_all, load_tokenizer, opens_answer, render, render_all

DATA = Path(os.environ.get("SPMD_RL_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tokenizer of bytes that puts <bos> before every text, as Llama's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<|im_start|>", "<|im_end|>"])
    backend.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 256)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(str(directory))


CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1 + 1, ça va?"}]


def test_rendering_gives_what_transformers_gives(tokenizer):
    expected = tokenizer.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert render(tokenizer, CHAT) == expected
    assert render_all(tokenizer, [CHAT, CHAT[1:]]) == [expected, render(tokenizer, CHAT[1:])]
    assert render_all(tokenizer, []) == []


def test_rendering_adds_no_token_that_the_template_does_not_write(tokenizer):
    assert 256 not in render(tokenizer, CHAT)
    assert encode_all(tokenizer, ["a"])[0][0] == 256


def test_decoding_shows_special_tokens_when_asked(tokenizer):
    ids = render(tokenizer, CHAT[1:])
    assert decode(tokenizer, ids) == "user\n1 + 1, ça va?\nassistant\n"
    assert decode(tokenizer, ids, special=True) == "<|im_start|>user\n1 + 1, ça va?<|im_end|>\n<|im_start|>assistant\n"


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no tokenizer in it"):
        load_tokenizer(str(tmp_path))


def test_each_row_of_gsm8k_is_rendered_and_encoded_once_with_hundreds_of_others(tokenizer, monkeypatch):
    source = DATA / "gsm8k" / "train.jsonl"
    if not source.is_file():
        pytest.skip(f"{source} is not there; set SPMD_RL_TEST_DATA")
    config = Config(ModelConfig("m"), DataConfig(source=str(source), prompt_column="question"))
    calls = {"render_text": [], "encode_rendered": []}
    for name, sizes in calls.items():
        counted = getattr(tokens, name)
        monkeypatch.setattr(
            tokens, name, lambda t, some, *more, f=counted, n=sizes: n.append(len(some)) or f(t, some, *more)
        )
    loaded = load_prompts(config, tokenizer, "train")
    assert len(loaded.prompts) == 7473
    assert all(sum(sizes) == 7473 and len(sizes) < 7473 / 256 for sizes in calls.values()), calls
    some = [json.loads(line)["question"] for line in source.read_text().splitlines()[:500]]
    one_by_one = [render(tokenizer, [{"role": "user", "content": question}]) for question in some]
    assert [list(prompt.token_ids) for prompt in loaded.prompts[: len(some)]] == one_by_one


def test_dapo_rows_are_read_as_they_are_published(tokenizer):
    source = DATA / "dapo" / "dapo_exact_16.jsonl"
    if not source.is_file():
        pytest.skip(f"{source} is not there; set SPMD_RL_TEST_DATA")
    data = DataConfig(eval_source=str(source), answer_column="reward_model.ground_truth")
    loaded = load_prompts(Config(ModelConfig("m"), data), tokenizer, "eval")
    rows = [json.loads(line) for line in source.open()]
    assert [prompt.answer for prompt in loaded.prompts] == [row["reward_model"]["ground_truth"] for row in rows]
    assert loaded.prompts[0].text == rows[0]["prompt"][-1]["content"]


def test_a_template_without_a_generation_prompt_is_told_from_one_that_needs_none(tiny_models):
    tokenizer = load_tokenizer(tiny_models["llama"])
    own = tokenizer.chat_template
    without = own.partition("{% if add_generation_prompt")[0]
    inst = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    )
    assert [opens_answer(tokenizer, template) for template in (own, without, inst, None)] == [
        True,
        False,
        True,
        True,
    ]
