"""Named templates write what their formats say, token for token."""

from pathlib import Path

import pytest

from spmd_rl.config.data_config import DataConfig, DatasetConfig
from spmd_rl.config.template_names import DIRECTORY
from spmd_rl.data.sources.prompts import encode, load_dataset, template_of
from spmd_rl.data.templates import Template, load_template
from spmd_rl.data.tokens import load_tokenizer, render, render_text
from tiny_tokenizer import make_tokenizer

ONE = [{"role": "user", "content": "1+1?"}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
]
R1 = (
    "Think the question through before you answer it. Write your reasoning between <think> and </think>, then your "
    "answer between <answer> and </answer>, as in <think>reasoning</think><answer>answer</answer>. Give the final "
    "result inside \\boxed{}."
)
ALPACA = "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
IM = "<|im_start|>{}\n{}<|im_end|>\n"
CHATML_CHAT = (
    IM.format("system", "Be brief.")
    + IM.format("user", "1+1?")
    + IM.format("assistant", "2")
    + IM.format("user", "2+2?")
    + "<|im_start|>assistant\n"
)
HELPFUL = IM.format("system", "You are a helpful assistant.")
ASK = IM.format("user", "1+1?") + "<|im_start|>assistant\n"
SUMS = "".join(
    IM.format("user", f"What is {sum}?") + IM.format("assistant", f"<think>{thought}</think><answer>{answer}</answer>")
    for sum, thought, answer in (
        ("3 + 4", "3 + 4 = 7", "7"),
        ("8 + 5", "8 + 5 = 12. Wait, let me check: 8 + 5 = 13", "13"),
        ("12 + 6", "12 + 6 = 18", "18"),
    )
)
INST = "<s>[INST] {}1+1? [/INST]"
HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"
# name -> a question alone, and a conversation with a system message.
EXPECTED = {
    "default": ("Human: 1+1?\nAssistant:", "Be brief.\nHuman: 1+1?\nAssistant:2</s>\nHuman: 2+2?\nAssistant:"),
    "empty": ("1+1?", "Be brief.1+1?22+2?"),
    "trl": ("<s>1+1?", "<s>Be brief.1+1?22+2?"),
    "alpaca": (
        ALPACA + "### Instruction:\n1+1?\n\n### Response:\n",
        "Be brief.\n\n### Instruction:\n1+1?\n\n### Response:\n2</s>\n\n### Instruction:\n2+2?\n\n### Response:\n",
    ),
    "question_answer": (
        "Question: 1+1?\nAnswer:",
        "Be brief.\n\nQuestion: 1+1?\nAnswer: 2\n\nQuestion: 2+2?\nAnswer:",
    ),
    "chatml": (ASK, CHATML_CHAT),
    "sums_think": (SUMS + ASK, SUMS + CHATML_CHAT),
    "qwen": (HELPFUL + ASK, CHATML_CHAT),
    "qwen_r1": (
        HELPFUL + ASK.replace("1+1?", f"{R1}\n1+1?"),
        CHATML_CHAT.replace("1+1?", f"{R1}\n1+1?").replace("2+2?", f"{R1}\n2+2?"),
    ),
    "qwen_math_r1": (IM.format("system", R1) + ASK, CHATML_CHAT),
    "qwen3": (ASK, CHATML_CHAT),
    "llama2": (INST.format(""), INST.format("<<SYS>>\nBe brief.\n<</SYS>>\n\n") + " 2 </s><s>[INST] 2+2? [/INST]"),
    "llama3": (
        f"<s>{HEAD.format('user')}1+1?<|eot_id|>{HEAD.format('assistant')}",
        f"<s>{HEAD.format('system')}Be brief.<|eot_id|>{HEAD.format('user')}1+1?<|eot_id|>{HEAD.format('assistant')}2"
        f"<|eot_id|>{HEAD.format('user')}2+2?<|eot_id|>{HEAD.format('assistant')}",
    ),
    "mistral": (INST.format(""), INST.format("Be brief.\n\n") + " 2</s>[INST] 2+2? [/INST]"),
    "mixtral": (INST.format(""), INST.format("Be brief.\n\n") + " 2</s>[INST] 2+2? [/INST]"),
    "gemma": (
        "<s><start_of_turn>user\n1+1?<end_of_turn>\n<start_of_turn>model\n",
        "<s><start_of_turn>user\nBe brief.\n\n1+1?<end_of_turn>\n<start_of_turn>model\n2<end_of_turn>\n"
        "<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n",
    ),
    "deepseek2": (
        "<s>User: 1+1?\n\nAssistant:",
        "<s>Be brief.\n\nUser: 1+1?\n\nAssistant: 2</s>User: 2+2?\n\nAssistant:",
    ),
    "deepseek2-lite": (
        "<s>User: 1+1?\n\nAssistant:",
        "<s>Be brief.\n\nUser: 1+1?\n\nAssistant: 2</s>User: 2+2?\n\nAssistant:",
    ),
    "minicpm3": (
        "User: 1+1?\n\nAssistant:",
        "Be brief.\n\nUser: 1+1?\n\nAssistant: 2</s>User: 2+2?\n\nAssistant:",
    ),
    "deepseek3": (
        "<s><｜User｜>1+1?<｜Assistant｜>",
        "<s>Be brief.<｜User｜>1+1?<｜Assistant｜>2</s><｜User｜>2+2?<｜Assistant｜>",
    ),
    "deepseek3_r1": (
        f"<s>{R1} <｜User｜>1+1?<｜Assistant｜>",
        f"<s>{R1} Be brief.<｜User｜>1+1?<｜Assistant｜>2</s><｜User｜>2+2?<｜Assistant｜>",
    ),
    "baichuan2": (
        "<reserved_106>1+1?<reserved_107>",
        "Be brief.<reserved_106>1+1?<reserved_107>2<reserved_106>2+2?<reserved_107>",
    ),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory):
    tokenizer = load_tokenizer(str(directory))
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    return tokenizer


def test_every_template_is_tested():
    assert sorted(EXPECTED) == sorted(path.stem for path in DIRECTORY.glob("*.jinja"))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_template_writes_its_format(tokenizer, name):
    text = load_template(name).text
    assert tuple(render_text(tokenizer, [ONE, CHAT], text)) == EXPECTED[name]
    # Nothing but what the template wrote, and special tokens as such.
    ids = render(tokenizer, ONE, template=text)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == EXPECTED[name][0]
    assert (tokenizer.bos_token_id in ids) == EXPECTED[name][0].startswith("<s>")


def test_r1_templates_name_the_tags_and_the_box():
    for name in EXPECTED:
        if name.endswith("_r1"):
            assert all(word in load_template(name).text for word in ("<think>", "<answer>", "\\boxed{}"))


def test_qwen3_turns_thinking_off_and_forgets_earlier_thoughts(tokenizer):
    text = load_template("qwen3").text
    assert render_text(tokenizer, [ONE], text, enable_thinking=True) == [ASK]
    assert render_text(tokenizer, [ONE], text, enable_thinking=False) == [ASK + "<think>\n\n</think>\n\n"]
    thought = [dict(message) for message in CHAT]
    thought[2]["content"] = "<think>\nhm\n</think>\n\n2"
    assert render_text(tokenizer, [thought], text) == [CHATML_CHAT]


def test_a_template_that_does_not_know_thinking_is_refused(tokenizer):
    for template in (load_template("qwen"), Template("chat")):
        with pytest.raises(ValueError, match="data.enable_thinking = False: the template does not know it"):
            encode(tokenizer, template, DataConfig(enable_thinking=False), [ONE])
    with pytest.raises(ValueError, match="data.enable_thinking = True: data.template = plain"):
        encode(tokenizer, load_template("plain"), DataConfig(enable_thinking=True), ["a"])


def test_a_template_may_be_a_file_of_ones_own(tmp_path, tokenizer):
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")
    assert render_text(tokenizer, [ONE], load_template(str(file)).text) == ["user: 1+1?"]
    with pytest.raises(ValueError, match="data.template = .*none.jinja: there is no such file"):
        load_template(str(tmp_path / "none.jinja"))


def test_an_unknown_template_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="data.template = qwen_r2: there is no such template; did you mean qwen_r1?"):
        load_template("qwen_r2")


def test_the_runs_template_comes_before_the_datasets_and_that_before_the_models_own():
    dataset = DatasetConfig("x", template="qwen")
    assert template_of(dataset, DataConfig(template="llama3")).name == "llama3"
    assert template_of(dataset, DataConfig()).name == "qwen"
    assert template_of(DatasetConfig("x"), DataConfig()).name == "chat"


def test_a_named_template_reaches_the_prompts(tmp_path, tokenizer):
    file = tmp_path / "x.csv"
    file.write_text("prompt,answer\n1+1?,2\n")
    dataset = DatasetConfig(str(file))
    loaded = load_dataset(dataset, DataConfig(template="deepseek3"), tokenizer, 1, "train", None)
    assert tokenizer.decode(loaded.prompts[0].token_ids) == EXPECTED["deepseek3"][0]


def test_templates_are_in_the_folder_that_the_documentation_names():
    assert Path(__file__).parents[2] / "configs" / "templates" == DIRECTORY
