"""Worked examples before the questions of an evaluation."""

import json

import pytest

from spmd_rl.config.data_config import DataConfig, DatasetConfig
from spmd_rl.config.loading import load_dataset_config
from spmd_rl.data.sources.few_shot import read_shots
from spmd_rl.data.sources.prompts import load_dataset
from spmd_rl.data.templates import load_template
from spmd_rl.data.tokens import load_tokenizer, render_text
from tiny_tokenizer import make_tokenizer

GSM8K = {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4\n#### 4"}
TURNS = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": GSM8K["answer"]}]


@pytest.fixture
def gsm8k(tmp_path):
    for split, rows in (("train", [GSM8K, GSM8K]), ("test", [{"question": "1 + 1?", "answer": "#### 2"}])):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_dataset_config(f"gsm8k:{tmp_path}")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory)
    return load_tokenizer(str(directory))


def refusal(function, *arguments, **named):
    with pytest.raises(ValueError) as caught:
        function(*arguments, **named)
    return str(caught.value)


def test_they_are_the_first_rows_of_the_other_split_with_the_whole_solution(gsm8k):
    assert read_shots(1, None, gsm8k, DataConfig(), 1) == TURNS
    assert read_shots(2, None, gsm8k, DataConfig(), 1) == TURNS * 2
    assert "shots = 3" in (said := refusal(read_shots, 3, None, gsm8k, DataConfig(), 1)) and "has only 2" in said


def test_they_come_from_a_file_of_ones_own(tmp_path, gsm8k):
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps({"prompt": "3?", "answer": "<think>3</think><answer>3</answer>"}) + "\n")
    asked, answered = read_shots(1, str(file), gsm8k, DataConfig(), 1)
    assert (asked["content"], answered["content"]) == ("3?", "<think>3</think><answer>3</answer>")


def test_a_benchmark_without_another_split_asks_for_a_source(tmp_path):
    dataset = DatasetConfig(str(tmp_path / "math.jsonl"), name="math", split="test")
    said = refusal(read_shots, 2, None, dataset, DataConfig(), 1)
    assert said.startswith("shots = 2: math has no split for training") and "shots_source" in said


def test_problems_made_on_the_spot_are_not_those_that_are_asked(tokenizer):
    dataset = DatasetConfig("arithmetic", options={"max_operand": 9})
    shots = read_shots(4, None, dataset, DataConfig(), 1)
    asked = load_dataset(dataset, DataConfig(template="question_answer"), tokenizer, 1, "eval", 20, shots=shots)
    assert {shot["content"] for shot in shots}.isdisjoint(prompt.text for prompt in asked.prompts)
    assert all(shot["content"].isdigit() for shot in shots[1::2])


def test_they_stand_behind_the_system_message_and_before_the_question(gsm8k, tokenizer):
    data = DataConfig(template="question_answer", system="Be brief.")
    (prompt,) = load_dataset(gsm8k, data, tokenizer, 1, "eval", None, shots=TURNS).prompts
    assert (prompt.text, prompt.answer) == ("1 + 1?", "2")
    assert [message["content"] for message in prompt.messages] == [
        "Be brief.",
        *(turn["content"] for turn in TURNS),
        "1 + 1?",
    ]
    text = render_text(tokenizer, [prompt.messages], load_template("question_answer").text)[0]
    assert text.endswith(f"Question: Two and two?\nAnswer: {GSM8K['answer']}\n\nQuestion: 1 + 1?\nAnswer:")


def test_plain_text_has_no_place_for_them(gsm8k, tokenizer):
    plain = DataConfig(template="plain")
    said = refusal(load_dataset, gsm8k, plain, tokenizer, 1, "eval", None, shots=TURNS)
    assert said.startswith("template = plain: it has no turns")
