"""Files and made problems to prompts, and the order in which steps take them."""

import json

import pytest

from spmd_rl.config.config import Config, EvaluationConfig, ModelConfig, TrainConfig
from spmd_rl.config.data_config import DataConfig, DatasetConfig
from spmd_rl.data.sources.prompts import load_dataset, load_prompts


class Tokenizer:
    """A token a character; a template that shows where it was used."""

    chat_template = "yes"
    name_or_path = "here"

    def apply_chat_template(self, conversations, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return ["".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]" for messages in conversations]

    def __call__(self, texts, add_special_tokens=True):
        return {"input_ids": [[1] * add_special_tokens + [ord(letter) for letter in text] for text in texts]}


def shown(prompt):
    return "".join(map(chr, prompt.token_ids)).replace("\1", "<bos>")


@pytest.fixture
def load(tmp_path):
    def loaded(rows, split="train", name="rows.jsonl", tokenizer=None, **data):
        file = tmp_path / name
        file.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
        data = {"source": str(file), "eval_source": str(file)} | data
        config = Config(ModelConfig("m"), DataConfig(**data), train=TrainConfig(prompts_per_step=1))
        return load_prompts(config, tokenizer or Tokenizer(), split)

    return loaded


ROWS = [{"prompt": "1+1", "answer": "2"}, {"prompt": "two", "answer": 2, "level": 3}]


def refusal(function, *arguments, **named):
    with pytest.raises(ValueError) as caught:
        function(*arguments, **named)
    return str(caught.value)


def test_a_row_becomes_a_prompt_with_all_its_columns(load):
    first, second = load(ROWS).prompts
    assert (first.index, first.text, first.answer, first.row) == (0, "1+1", "2", ROWS[0])
    assert shown(first) == "[user]1+1[assistant]"
    assert (second.index, second.answer, second.row["level"]) == (1, "2", 3)


@pytest.mark.parametrize("template", ["chat", "plain"])
def test_a_text_that_comes_again_is_tokenized_once_and_is_a_prompt_each_time(load, template):
    read = []

    class Counting(Tokenizer):
        def __call__(self, texts, **how):
            read.extend(texts)
            return super().__call__(texts, **how)

    rows = [{"prompt": f"{number % 7}", "answer": f"{number}"} for number in range(600)]  # more than a batch
    prompts = load(rows, tokenizer=Counting(), template=template).prompts
    form = "[user]{}[assistant]" if template == "chat" else "<bos>{}"
    assert [shown(prompt) for prompt in prompts] == [form.format(row["prompt"]) for row in rows]
    assert [prompt.answer for prompt in prompts] == [row["answer"] for row in rows]
    assert len(read) == len(set(read)) == 7


def test_json_jsonl_and_csv_files_give_the_same_prompts(load):
    rows = [{"prompt": 'a "b", c\nd', "answer": "2"}, {"prompt": "e", "answer": "3"}]
    expected = load(rows)
    assert load(json.dumps(rows), name="rows.json") == expected
    assert load('prompt,answer\n"a ""b"", c\nd",2\ne,3\n', name="rows.csv") == expected
    assert load("\ufeff\n" + "\n\n".join(map(json.dumps, rows)) + "\n\n") == expected


def test_columns_are_named_and_may_lie_inside_an_object(load):
    rows = [{"question": "1+1", "reward_model": {"ground_truth": "2"}}]
    (prompt,) = load(rows, prompt_column="question", answer_column="reward_model.ground_truth").prompts
    assert (prompt.text, prompt.answer) == ("1+1", "2")


def test_a_missing_column_names_file_setting_and_the_columns_there_are(load):
    said = refusal(load, ROWS, prompt_column="question")
    assert said.startswith("data.prompt_column = question: row 0 of ")
    assert "rows.jsonl has no such column; it has prompt, answer; name one of these" in said
    said = refusal(load, ROWS, answer_column="level")
    assert said.startswith("data.answer_column = level: row 0 of ")


def test_a_chat_list_is_rendered_message_by_message(load):
    chat = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "?"}]
    (prompt,) = load([{"prompt": chat, "answer": "2"}]).prompts
    assert shown(prompt) == "[user]1+1[assistant]2[user]?[assistant]"
    assert prompt.text == "?"


def test_a_system_message_is_put_before_text_and_chat(load):
    chat = [{"role": "user", "content": "1+1"}]
    loaded = load([{"prompt": chat, "answer": "2"}, ROWS[0]], system="be brief")
    assert [shown(prompt) for prompt in loaded.prompts] == ["[system]be brief[user]1+1[assistant]"] * 2
    said = refusal(load, [{"prompt": [{"role": "system", "content": "x"}, *chat], "answer": "2"}], system="be brief")
    assert "row 0" in said and "leave data.system out" in said


def test_a_text_is_put_behind_every_prompt_and_the_last_message(tmp_path):
    chat = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3?"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": asked, "answer": "2"}) + "\n" for asked in (chat, "1+1", " ")))
    dataset, data = DatasetConfig(str(file), prompt_suffix=" Box it."), DataConfig(bad_rows="drop")
    found = load_dataset(dataset, data, Tokenizer(), 1, "train", None)
    assert [shown(prompt) for prompt in found.prompts] == [
        "[user]1+1[assistant]2[user]3? Box it.[assistant]",
        "[user]1+1 Box it.[assistant]",
    ]
    assert "is empty" in found.notes[0]


def test_the_plain_template_is_the_text_with_the_tokenizers_own_tokens(load):
    assert shown(load(ROWS, template="plain").prompts[0]) == "<bos>1+1"
    said = refusal(load, [{"prompt": [{"role": "user", "content": "x"}], "answer": "2"}], template="plain")
    assert "data.template = plain needs text" in said


def test_a_tokenizer_without_a_chat_template_is_refused_with_the_way_out(load):
    tokenizer = Tokenizer()
    tokenizer.chat_template = None
    assert "set data.template to plain" in refusal(load, ROWS, tokenizer=tokenizer)


@pytest.mark.parametrize(
    "prompt, said", [("  ", "is empty"), (7, "holds int"), ([], "holds list"), ([{"role": "user"}], "holds list")]
)
def test_a_prompt_that_is_none_names_its_row(load, prompt, said):
    message = refusal(load, [*ROWS, {"prompt": prompt, "answer": "2"}])
    assert message.startswith("data.prompt_column = prompt: row 2 of ") and said in message


def test_empty_answers_are_refused_or_dropped_with_a_count(load):
    rows = [*ROWS, {"prompt": "a", "answer": " "}, {"prompt": "b", "answer": None}]
    assert "2 of 4 rows of" in refusal(load, rows)
    assert "(rows 2, 3)" in refusal(load, rows)
    loaded = load(rows, empty_answers="drop")
    assert [prompt.index for prompt in loaded.prompts] == [0, 1]
    (note,) = loaded.notes
    assert note.startswith("data.empty_answers = drop: 2 of 4 rows of")
    assert "nothing is left" in refusal(load, rows[2:], empty_answers="drop")


def test_a_datasets_file_may_say_that_rows_without_an_answer_are_left_out(load, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + json.dumps({"prompt": "a", "answer": ""}))
    file = tmp_path / "mine.yaml"
    file.write_text(f"source: {tmp_path / 'rows.jsonl'}\nempty_answers: drop\n")
    assert len(load(ROWS, name="other.jsonl", source=str(file)).prompts) == 1
    assert "1 of 2 rows of" in refusal(load, ROWS, name="other.jsonl", source=str(file), empty_answers="refuse")


def test_an_answer_of_another_type_is_refused_with_what_is_inside(load):
    said = refusal(load, [{"prompt": "a", "answer": {"target": 98, "numbers": [44, 19]}}])
    assert "row 0 of" in said and "name what is inside it: answer.target, answer.numbers" in said
    assert "answer.0" in refusal(load, [{"prompt": "a", "answer": [{"x": 1}]}])
    assert load([{"prompt": "a", "answer": 0}]).prompts[0].answer == "0"


def test_a_list_is_its_one_item_or_all_of_them_and_an_item_can_be_named(load):
    rows = [{"prompt": "a", "answer": ["2"]}, {"prompt": "b", "answer": ["5", 7]}]
    loaded = load(rows)
    assert [prompt.answer for prompt in loaded.prompts] == ["2", "5, 7"]
    assert "1 of 2 rows of" in loaded.notes[0] and "answer.0 is the first alone" in loaded.notes[0]
    assert [prompt.answer for prompt in load(rows, answer_column="answer.0").prompts] == ["2", "5"]
    nested = [{"prompt": "a", "answer": {"roots": [[1, 2], [3]]}}]
    assert load(nested, answer_column="answer.roots.0").prompts[0].answer == "1, 2"
    assert "no such column" in refusal(load, rows, answer_column="answer.1")


def test_a_conversation_that_ends_with_the_assistants_answer_is_refused_or_loses_it(load):
    turns = [("system", "brief"), ("user", "What is 2+5?"), ("assistant", "It is 7. #### 7")]
    rows = [{"chat": [{"role": role, "content": text} for role, text in turns], "answer": "seven"}]
    said = refusal(load, rows, prompt_column="chat")
    assert "row 0 of" in said and "data.assistant_turn = refuse" in said and "set it to drop" in said
    (dropped,) = load(rows, prompt_column="chat", assistant_turn="drop").prompts
    assert shown(dropped) == "[system]brief[user]What is 2+5?[assistant]"
    assert (dropped.text, dropped.answer) == ("What is 2+5?", "seven")
    del rows[0]["answer"]
    pattern = "#### (.*)"
    (read,) = load(rows, prompt_column="chat", assistant_turn="answer", answer_pattern=pattern).prompts
    assert (shown(read), read.answer) == (shown(dropped), "7")


def test_a_plain_prompt_does_not_end_with_the_tokenizers_own_end_token(load):
    class Ends(Tokenizer):
        eos_token_id, eos_token = 2, "\2"

        def __call__(self, texts, add_special_tokens=True):
            made = super().__call__(texts, add_special_tokens)["input_ids"]
            return {"input_ids": [ids + [2] * add_special_tokens for ids in made]}

    assert shown(load(ROWS, template="plain", tokenizer=Ends()).prompts[0]) == "<bos>1+1"
    assert shown(load([{"prompt": "1\2", "answer": "1"}], template="plain", tokenizer=Ends()).prompts[0])[-1] == "\2"


def test_overlong_prompts_are_dropped_with_a_count_or_refused_by_row_and_length(load):
    rows = [*ROWS, {"prompt": "x" * 100, "answer": "1"}]
    loaded = load(rows, max_prompt_length=50)
    assert [prompt.index for prompt in loaded.prompts] == [0, 1]
    (note,) = loaded.notes
    assert note.startswith("data.max_prompt_length = 50: 1 of 3 prompts of") and "the longest has 117 tokens" in note
    assert "(row 2: 117 tokens)" in refusal(load, rows, max_prompt_length=50, overlong_prompts="refuse")
    assert "the shortest has 20 tokens" in refusal(load, rows, max_prompt_length=5)
    assert len(load(rows, max_prompt_length=117).prompts) == 3


@pytest.mark.parametrize(
    "name, text, said",
    [
        (
            "rows.jsonl",
            '{"prompt": "a", "answer": "1"}\n\n{"prompt": \n',
            "rows.jsonl, line 3, column 11: not valid JSON",
        ),
        ("rows.jsonl", '{"prompt": "a", "answer": "1"}\n[1]\n', "rows.jsonl, line 2: expected an object"),
        ("rows.json", '[{"prompt": "a"},\n{"prompt" "b"}]', "rows.json, line 2, column 11: not valid JSON"),
        ("rows.json", '{"a": 1}', "rows.json: expected a list of objects, found dict"),
        ("rows.json", "[1]", "rows.json, element 0: expected an object"),
        ("rows.csv", "prompt,answer\na,1\nb\n", "rows.csv, line 3: not one value for each column (prompt, answer)"),
        ("rows.csv", "prompt,answer\na,1,2\n", "rows.csv, line 2: not one value for each column"),
        ("rows.jsonl", "", "rows.jsonl: there is no row in it"),
        ("rows.parquet", "", "rows.parquet: not a whole Parquet file"),
    ],
)
def test_a_file_that_cannot_be_read_names_file_and_line(load, name, text, said):
    assert said in refusal(load, text, name=name)


def test_held_out_prompts_are_the_first_of_their_file(load):
    rows = [{"prompt": str(i), "answer": "" if i == 0 else "1"} for i in range(9)]
    loaded = load(rows, "eval", empty_answers="drop", eval_problems=3)
    assert [prompt.index for prompt in loaded.prompts] == [1, 2, 3]
    assert load(rows, "eval", eval_problems=0).prompts == []
    assert load(rows, "eval", eval_source=None).prompts == []


def test_fewer_prompts_than_a_step_takes_are_refused(load, tmp_path):
    load(ROWS)
    data = DataConfig(source=str(tmp_path / "rows.jsonl"))
    config = Config(ModelConfig("m"), data, train=TrainConfig(prompts_per_step=3))
    assert refusal(load_prompts, config, Tokenizer(), "train").startswith("train.prompts_per_step = 3: ")


def test_made_problems_are_noted_where_the_operands_allow_fewer_than_asked():
    config = Config(ModelConfig("m"))
    train, held_out = (load_prompts(config, Tokenizer(), split) for split in ("train", "eval"))
    assert len(train.prompts) == 2000
    assert {p.text for p in train.prompts}.isdisjoint({p.text for p in held_out.prompts})
    assert len({p.text for p in train.prompts}) + len(held_out.prompts) == 100
    assert train.notes[0].startswith("data.arithmetic.problems = 2000: the operands allow ")
    assert held_out.notes[0].startswith(f"data.eval_problems = 128: only {len(held_out.prompts)} problems")


def test_made_problems_need_no_named_columns():
    data = DataConfig(prompt_column="question", answer_column="solution")
    assert len(load_prompts(Config(ModelConfig("m"), data), Tokenizer(), "train").prompts) == 2000


def test_rows_without_an_answer_are_prompts_where_no_answer_is_asked_for(load):
    asked = load([{"prompt": "1+1"}, {"prompt": "two"}], answer_column="")
    assert [(prompt.text, prompt.answer) for prompt in asked.prompts] == [("1+1", ""), ("two", "")]


def plain(tmp_path, count, **evaluation):
    file = tmp_path / "mine.jsonl"
    rows = [{"prompt": f"{n} + {n}?", "answer": str(2 * n)} for n in range(count)] * 2
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train, data = TrainConfig(prompts_per_step=1), DataConfig(source=str(file), template="plain", eval_problems=7)
    return Config(ModelConfig("m"), data, train=train, evaluation=EvaluationConfig(**evaluation))


def test_held_out_problems_are_taken_out_of_a_plain_file_where_evaluation_is_asked_for(tmp_path):
    config = plain(tmp_path, 200, every_steps=2)
    train, held = (load_prompts(config, Tokenizer(), split) for split in ("train", "eval"))
    assert len(train.prompts) == 386 and len({prompt.text for prompt in held.prompts}) == len(held.prompts) == 7
    assert {prompt.text for prompt in train.prompts}.isdisjoint(prompt.text for prompt in held.prompts)
    assert f"data.eval_source is not set: 7 of the 400 problems of {config.data.source} are held out of training" in (
        train.notes
    )
    assert held.shares == ((7, 1.0),) and train.shares == ((386, 1.0),)


@pytest.mark.parametrize("evaluation", [{}, {"every_steps": 2, "benchmarks": ("arithmetic",)}])
def test_nothing_is_held_out_where_nobody_asks(tmp_path, evaluation):
    config = plain(tmp_path, 20, **evaluation)
    assert len(load_prompts(config, Tokenizer(), "train").prompts) == 40
    assert load_prompts(config, Tokenizer(), "eval").prompts == []


def test_a_file_of_few_problems_gives_one(tmp_path):
    held = load_prompts(plain(tmp_path, 2, every_steps=1), Tokenizer(), "eval").prompts
    assert len({prompt.text for prompt in held}) == 1
