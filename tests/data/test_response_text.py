"""Test that what rules see of a response is what was generated, and it ends where the model says."""

import json
from pathlib import Path

import pytest

from spmd_rl.config.data_config import DataConfig, DatasetConfig
from spmd_rl.data.response_text import ResponseText, described, end_tokens, templates_of
from spmd_rl.data.sources.prompts import Prompt, load_dataset
from spmd_rl.data.text_stream import TextStream
from spmd_rl.data.tokens import decode, encode_rendered, load_tokenizer, render_text
from spmd_rl.rewards.reward_sample import of_record, of_tokens
from spmd_rl.rewards.rules.format import format_tags
from tiny_tokenizer import CHAT_TEMPLATE, make_tokenizer

TEMPLATES = sorted((Path(__file__).parents[2] / "configs" / "templates").glob("*.jinja"))
THINKING = CHAT_TEMPLATE.replace("assistant\n{%", "assistant\n<think>\n{%")
TOOLS = CHAT_TEMPLATE.replace("assistant\n{%", "assistant\n<tool_call>{%")
TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>", "<|eot_id|>")
RESPONSES = [
    "because</think><answer>7</answer>",
    "<think>why\n\n</think> <answer>\\boxed{7}</answer>",
    '<tool_call>{"name": "add"}</tool_call> ünï 让我 🤔',
    "  spaces  and <unused words>",
    "",
]


@pytest.fixture(scope="module", params=["special tags", "added tags", "no tags"])
def tokenizer(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory)
    made = load_tokenizer(str(directory))
    if request.param != "no tags":
        made.add_tokens(list(TAGS), special_tokens=request.param == "special tags")
    return made


@pytest.mark.parametrize("template", [*(path.read_text() for path in TEMPLATES), CHAT_TEMPLATE, THINKING, TOOLS])
def test_what_a_rule_sees_joined_to_the_prompt_is_the_tokens_that_are_trained_on(tokenizer, template):
    [text] = render_text(tokenizer, [[{"role": "user", "content": "What is 3+4? ünï"}]], template)
    [ids] = encode_rendered(tokenizer, [text])
    prompt = Prompt(0, tuple(ids), "What is 3+4? ünï", "7", {})
    shown = ResponseText(tokenizer, [tokenizer.eos_token_id])
    for words in RESPONSES:
        made = [*encode_rendered(tokenizer, [words])[0], tokenizer.eos_token_id]
        sample = of_tokens(prompt, decode(tokenizer, ids, special=True), shown(made), made, "stop", 99)
        assert sample.prompt == "What is 3+4? ünï" and sample.rendered == text
        assert sample.response == words
        assert encode_rendered(tokenizer, [sample.rendered + sample.response])[0] == ids + made[:-1]


@pytest.mark.parametrize("kind", ["Llama 2", "Mistral"])
def test_the_space_that_a_response_begins_with_is_seen_where_a_text_would_lose_it(kind):
    tokenizer = sentencepiece(kind)
    [text] = render_text(tokenizer, [[{"role": "user", "content": "3+4?"}]])
    [ids] = encode_rendered(tokenizer, [text])
    prompt, shown = Prompt(0, tuple(ids), "3+4?", "7", {}), ResponseText(tokenizer, [tokenizer.eos_token_id])
    for words in (["▁7"], ["▁", "▁7"], ["7"], ["<think>", "▁7", "</think>"], ["<0xE8>", "<0xAE>", "<0xA9>", "▁7"], []):
        made = tokenizer.convert_tokens_to_ids([*words, "</s>"])
        sample = of_tokens(prompt, decode(tokenizer, ids, special=True), shown(made), made, "stop", 99)
        assert sample.rendered + sample.response == decode(tokenizer, ids + made[:-1], special=True)
        stream = TextStream(tokenizer, [tokenizer.eos_token_id])
        assert "".join([*(stream.add([id]) for id in made), stream.add([], last=True)]) == sample.response


def sentencepiece(kind):
    """Make a tokenizer that begins words with ▁, and text with one that nobody wrote."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted({*"abcdefghijklmnopqrstuvwxyz0123456789+?:[]\n▁"})
    words = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁7"]
    vocabulary = {word: id for id, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "7")], byte_fallback=True, unk_token="<unk>"))
    if kind == "Llama 2":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    strip = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), *strip])
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in ("<s>", "</s>")])
    made.add_tokens([AddedToken(word, normalized=False) for word in ("<think>", "</think>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} [bot]:{% endif %}"
    )
    return tokenizer


def test_a_setting_leaves_all_special_tokens_out(tokenizer):
    special = any(token.content == "<think>" and token.special for token in tokenizer.added_tokens_decoder.values())
    ids = encode_rendered(tokenizer, ["<think>why</think>"])[0]
    assert ResponseText(tokenizer, skip_special_tokens=True)(ids) == ("why" if special else "<think>why</think>")


def test_a_think_tag_that_the_template_opened_counts_also_in_an_audit():
    line = {"prompt": "<|im_start|>assistant\n<think>\n", "question": "What?", "response": RESPONSES[0], "answer": "7"}
    assert format_tags(of_record(line, 9)) == 1.0
    assert format_tags(of_record(line | {"prompt": "<|im_start|>assistant\n"}, 9)) == 0.0


def test_a_response_ends_at_the_end_tokens_of_tokenizer_config_generation_config_and_turn(tmp_path):
    make_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 300]}))
    tokenizer = load_tokenizer(str(tmp_path))
    ends = end_tokens(tokenizer, str(tmp_path))
    assert ends == {2: ["tokenizer", "template"], 0: ["config", "generation config"], 300: ["generation config"]}
    assert described(tokenizer, ends, ["STOP"]).startswith(
        "a response ends at <|im_end|> (2: tokenizer, template), <|endoftext|> (0: config, generation config), "
    )
    assert (
        2 in end_tokens(tokenizer, str(tmp_path), "plain")
        and "template" not in end_tokens(tokenizer, str(tmp_path), "plain")[2]
    )


@pytest.mark.parametrize(("end", "spelled"), [("<|eot_id|>", 515), ("\n", None)])
def test_the_end_of_a_turn_is_the_special_token_behind_it(tmp_path, end, spelled):
    make_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.add_tokens(["<|eot_id|>"], special_tokens=True)
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<|im_end|>\n", end)
    assert [id for id, said in end_tokens(tokenizer, "none").items() if "template" in said] == [spelled][
        : bool(spelled)
    ]


def test_the_end_of_a_turn_is_that_of_the_templates_that_wrote_the_prompts(tmp_path):
    make_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.add_tokens(["<|eot_id|>", "<end_of_turn>"], special_tokens=True)
    tokenizer.chat_template, tokenizer.eos_token = None, "<|endoftext|>"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1?", "answer": "2"}\n')
    splits = {
        split: load_dataset(
            DatasetConfig(str(rows), template=template), DataConfig(), tokenizer, 1, "eval", None
        ).prompts
        for split, template in (("train", "chatml"), ("eval", "llama3"), ("benchmark", "chatml"), ("more", "plain"))
    }
    assert templates_of(splits, None) == ["chatml", "llama3", "plain"] and templates_of({}, "gemma") == ["gemma"]
    ends = end_tokens(tokenizer, "none", *templates_of(splits, None))
    spelled = {tokenizer.convert_ids_to_tokens(id): said for id, said in ends.items()}
    assert spelled == {"<|endoftext|>": ["tokenizer"], "<|im_end|>": ["template"], "<|eot_id|>": ["template"]}
    assert list(end_tokens(tokenizer, "none", str(tmp_path / "gone.jinja"))) == [tokenizer.eos_token_id]


def test_a_model_that_ends_nowhere_is_said(tmp_path):
    make_tokenizer(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    tokenizer.eos_token, tokenizer.chat_template = None, None
    ends = end_tokens(tokenizer, "none")
    assert ends == {} and "nothing ends a response" in described(tokenizer, ends, [])
