"""Files of every kind give the same prompts; what cannot be read is refused by place, or dropped with a count."""

import json
import os
import random
import subprocess
import sys
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spmd_rl.config.config import Config, ModelConfig, TrainConfig
from spmd_rl.config.data_config import DataConfig, DatasetConfig
from spmd_rl.config.loading import load_dataset_config
from spmd_rl.data.sources.prompts import load_dataset, load_prompts

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("SPMD_RL_TEST_DATA", ROOT.parent / "shared" / "data"))


class Tokenizer:
    """A token a byte, UTF-8 only; a template that shows where it was used."""

    chat_template = "yes"
    name_or_path = "here"

    def apply_chat_template(self, conversations, tokenize, add_generation_prompt):
        return ["".join(f"[{m['role']}]{m['content']}" for m in messages) for messages in conversations]

    def __call__(self, texts, add_special_tokens=True):
        return {"input_ids": [list(text.encode()) for text in texts]}


class Words(Tokenizer):
    """A token a word."""

    def __call__(self, texts, add_special_tokens=True):
        return {"input_ids": [[1] * len(text.split()) for text in texts]}


def load(dataset, split="train", limit=None, **data):
    if not isinstance(dataset, DatasetConfig):
        dataset = load_dataset_config(str(dataset))
    return load_dataset(dataset, DataConfig(**data), Tokenizer(), 1, split, limit)


def refusal(*arguments, **named):
    with pytest.raises(ValueError) as caught:
        load(*arguments, **named)
    return str(caught.value)


def shown(prompt):
    return bytes(prompt.token_ids).decode()


ROWS = [{"prompt": f"{n} + 1?", "answer": str(n + 1), "level": n, "tags": ["a", "b"]} for n in range(5)]


def write(file, rows=ROWS):
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=2)
    elif file.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows))
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def asked(loaded):
    return [(p.index, shown(p), p.text, p.answer, p.row) for p in loaded.prompts]


def test_every_kind_of_file_gives_the_same_prompts(tmp_path):
    expected = asked(load(write(tmp_path / "rows.jsonl")))
    assert [row for *_, row in expected] == ROWS
    for suffix in ("json", "parquet", "arrow"):
        assert asked(load(write(tmp_path / f"rows.{suffix}"))) == expected
    file = tmp_path / "file.arrow"
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert asked(load(file)) == expected
    lines = tmp_path / "lines.json"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert asked(load(lines)) == expected


def test_a_directory_is_read_file_by_file_and_a_split_is_a_word_of_the_name(tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train-00000-of-00002.parquet", ROWS[:2])
    write(tmp_path / "data" / "train-00001-of-00002.parquet", ROWS[2:4])
    write(tmp_path / "test.jsonl", ROWS[4:])
    (tmp_path / "README.md").write_text("about")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "old.jsonl").write_text("broken")
    assert [p.row["level"] for p in load(tmp_path).prompts] == [0, 1, 2, 3, 4]
    assert [p.index for p in load(tmp_path).prompts] == [0, 1, 2, 3, 4]
    split = DatasetConfig(str(tmp_path), split="train", eval_split="test")
    assert [p.row["level"] for p in load(split).prompts] == [0, 1, 2, 3]
    assert [p.row["level"] for p in load(split, "eval").prompts] == [4]
    assert "has the split validation in its name" in refusal(DatasetConfig(str(tmp_path), split="validation"))
    (tmp_path / "empty").mkdir()
    assert "there is no .jsonl" in refusal(tmp_path / "empty")


def test_a_row_of_a_directory_is_named_by_its_own_file(tmp_path):
    write(tmp_path / "a.jsonl", ROWS[:2])
    write(tmp_path / "b.jsonl", [*ROWS[2:4], {"prompt": 5, "answer": "1"}])
    assert f"row 2 of {tmp_path / 'b.jsonl'} holds int" in refusal(tmp_path)


def test_what_datasets_saved_is_read_with_its_order_and_splits(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS)
    rows.select([3, 1]).save_to_disk(tmp_path / "one")
    assert [p.row["level"] for p in load(tmp_path / "one").prompts] == [3, 1]
    both = datasets.DatasetDict({"train": rows.select([0, 1]), "test": rows.select([4])})
    both.save_to_disk(tmp_path / "both")
    split = DatasetConfig(str(tmp_path / "both"), split="train", eval_split="test")
    assert asked(load(split)) == asked(load(write(tmp_path / "two.jsonl", ROWS[:2])))
    assert [p.row["level"] for p in load(split, "eval").prompts] == [4]
    assert "it has the splits train, test; set split" in refusal(tmp_path / "both")
    (tmp_path / "one" / "state.json").write_text("{}")
    assert "datasets cannot read it" in refusal(tmp_path / "one")


def test_a_hub_dataset_is_read_through_the_datasets_library(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    from spmd_rl.data.sources import tables
    from spmd_rl.data.sources.row import BadRows

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "owner").mkdir()
    write(tmp_path / "owner" / "train.jsonl")
    # The library takes a directory where it takes a name: the same call, without a network.
    found = list(tables.read_hub(str(tmp_path / "owner"), None, "train", BadRows("refuse"), None, []))
    assert found == ROWS


def test_without_a_network_a_hub_name_is_refused_with_the_way_out():
    script = (
        "from spmd_rl.data.sources.rows import BadRows, read_rows\n"
        "try:\n    list(read_rows('owner/dataset', BadRows('refuse')))\n"
        "except ValueError as error:\n    print(error)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    out = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.startswith("owner/dataset: neither on this machine nor loaded from the Hugging Face hub (")
    assert "name a file or directory that is there, or load it once" in out.stdout


def test_importing_the_data_package_loads_no_library():
    script = (
        "import sys, spmd_rl.data.sources.prompts, spmd_rl.data.sources.order, spmd_rl.data.sources.tables\n"
        "import spmd_rl.data.sources.tasks\n"
        "print(sorted({'torch', 'datasets', 'pyarrow', 'transformers', 'reasoning_gym', 'pandas', 'numpy'}"
        " & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    out = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# ---- columns


def test_a_query_follows_the_prompt_and_a_rows_own_system_message_comes_first(tmp_path):
    rows = [
        {"instruction": "Add.", "input": "1 + 1", "output": "2", "system": "be brief"},
        {"instruction": "Say 3.", "input": "", "output": 3, "system": None},
    ]
    dataset = DatasetConfig(
        str(write(tmp_path / "alpaca.jsonl", rows)),
        prompt_column="instruction",
        query_column="input",
        answer_column="output",
        system_column="system",
        system="think",
    )
    assert [shown(p) for p in load(dataset).prompts] == [
        "[system]be brief[user]Add.\n1 + 1",
        "[system]think[user]Say 3.",
    ]
    assert load(dataset).prompts[0].text == "Add.\n1 + 1"
    assert shown(load(dataset, system="hush").prompts[1]) == "[system]hush[user]Say 3."


def test_extra_columns_are_those_that_rewards_get(tmp_path):
    file = write(tmp_path / "rows.parquet")
    assert load(DatasetConfig(str(file), extra_columns=("level",))).prompts[2].row == {
        "prompt": "2 + 1?",
        "answer": "3",
        "level": 2,
    }
    assert set(load(DatasetConfig(str(file), extra_columns=())).prompts[0].row) == {"prompt", "answer"}
    said = refusal(DatasetConfig(str(file), extra_columns=("subject",)))
    assert "extra_columns = subject: row 0 of" in said and "it has prompt, answer, level, tags" in said


def test_binary_columns_are_left_out_with_a_note_and_other_values_are_what_json_has(tmp_path):
    rows = [{"prompt": "a", "answer": "1", "images": [{"bytes": b"\x89PNG", "path": "x"}], "day": date(2026, 1, 2)}]
    loaded = load(write(tmp_path / "rows.parquet", rows))
    assert loaded.prompts[0].row == {"prompt": "a", "answer": "1", "day": "2026-01-02"}
    assert loaded.notes == [
        f"{tmp_path / 'rows.parquet'}: images holds binary data (such as images), which is not kept"
    ]


def test_the_answer_is_where_the_pattern_matches_last(tmp_path):
    rows = [{"prompt": "a", "answer": "#### 3 or rather\n#### 1,450"}, {"prompt": "b", "answer": "#### -7"}]
    file = str(write(tmp_path / "rows.jsonl", rows))
    dataset = DatasetConfig(file, answer_pattern=r"#### (-?[\d,]+)", answer_without=",")
    assert [p.answer for p in load(dataset).prompts] == ["1450", "-7"]
    assert "matches nowhere in answer" in refusal(DatasetConfig(file, answer_pattern="boxed(.)"))
    assert "not a regular expression" in refusal(DatasetConfig(file, answer_pattern="("))
    assert "it has no group" in refusal(DatasetConfig(file, answer_pattern="####"))


def test_rows_that_repeat_are_left_out_with_a_count(tmp_path):
    rows = [{"prompt": f"{n % 3}", "answer": "1", "extra_info": {"index": f"id-{n % 3}"}} for n in range(300)]
    dataset = DatasetConfig(str(write(tmp_path / "dapo.parquet", rows)), deduplicate="extra_info.index")
    loaded = load(dataset)
    assert [p.index for p in loaded.prompts] == [0, 1, 2]
    assert loaded.notes[0].startswith("297 of 300 rows of ") and "extra_info.index" in loaded.notes[0]


# ---- what cannot be read

GOOD = b'{"prompt": "a", "answer": "1"}\n'
DEEP = b"[" * 100_000 + b"]" * 100_000
HOSTILE = {
    "broken UTF-8": (
        "x.jsonl",
        GOOD + b'{"prompt": "\xff\xfe", "answer": "1"}\n' + GOOD,
        "x.jsonl, line 2, byte 13: not UTF-8 text",
    ),
    "half a character": (
        "x.jsonl",
        GOOD + b'{"prompt": "\\ud83d", "answer": "1"}\n' + GOOD,
        "x.jsonl, line 2, column prompt: half of a character",
    ),
    "duplicate keys": (
        "x.jsonl",
        GOOD + b'{"prompt": "a", "answer": "1", "answer": "2"}\n' + GOOD,
        "x.jsonl, line 2: column answer is given twice in one row",
    ),
    "no JSON": ("x.jsonl", GOOD + b'{"prompt": \n' + GOOD, "x.jsonl, line 2, column 11: not valid JSON"),
    "cut off": ("x.jsonl", GOOD + GOOD + b'{"prompt": "a", "ans', "x.jsonl, line 3, column 17: not valid JSON"),
    "no object": ("x.jsonl", GOOD + b"[1]\n" + GOOD, "x.jsonl, line 2: expected an object"),
    "a number of 5,000 digits": ("x.jsonl", GOOD + b"1" * 5000 + b"\n" + GOOD, "x.jsonl, line 2: Exceeds the limit"),
    "too deep": ("x.jsonl", GOOD + DEEP + b"\n" + GOOD, "x.jsonl, line 2: "),
    "no column": ("x.jsonl", GOOD + b'{"prompt": "a"}\n' + GOOD, "answer: row 1 of"),
    "mixed types": ("x.jsonl", GOOD + b'{"prompt": 1, "answer": "1"}\n' + GOOD, "row 1 of"),
    "an answer that is a list": ("x.jsonl", GOOD + b'{"prompt": "a", "answer": [{}]}\n' + GOOD, "row 1 of"),
    "no text": ("x.jsonl", GOOD + b'{"prompt": null, "answer": "1"}\n' + GOOD, "row 1 of"),
    "no message": ("x.jsonl", GOOD + b'{"prompt": [{"role": "user"}], "answer": "1"}\n' + GOOD, "row 1 of"),
    "an element that is no object": ("x.json", b"[" + GOOD + b", 7, " + GOOD + b"]", "x.json, element 1: expected"),
    "lines of JSON, one broken": ("x.json", GOOD + b"{,}\n" + GOOD, "x.json, line 2, column 2: not valid JSON"),
    "CSV, a value too few": ("x.csv", b"prompt,answer\na,1\nb\nc,2\n", "x.csv, line 3: not one value for each column"),
    "CSV, broken UTF-8": ("x.csv", b"prompt,answer\na,1\n\xff,1\nc,2\n", "x.csv, line 3, column prompt: not UTF-8"),
    "CSV, a stray quote": ("x.csv", b'prompt,answer\na,1\n"b"c,1\nc,2\n', "x.csv, line 3: not valid CSV"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_row_that_cannot_be_used_is_refused_by_its_place_or_dropped_with_a_count(tmp_path, what):
    name, content, said = HOSTILE[what]
    file = tmp_path / name
    file.write_bytes(content)
    message = refusal(file)
    assert said in message and str(file) in message
    assert message.endswith("fix it, or set data.bad_rows to drop")
    loaded = load(file, bad_rows="drop")
    assert len(loaded.prompts) == 2
    assert loaded.notes[0].startswith(f"data.bad_rows = drop: 1 rows of {file} cannot be used and are left out: ")
    assert said in loaded.notes[0]


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("x.jsonl", b"", "there is no row in it"),
        ("x.jsonl", b"\xef\xbb\xbf\n\n", "there is no row in it"),
        ("x.json", b"", "there is no row in it"),
        ("x.json", b"[]", "there is no row in it"),
        ("x.json", b'[{"prompt": "\xff"}]', "x.json, line 1, byte 14: not UTF-8 text"),
        ("x.json", b'[{"prompt": "a", "answer": "1"}, {"pro', "x.json, line 1, column 35: not valid JSON"),
        ("x.csv", b"", "there is no row in it"),
        ("x.csv", b"a,a\n1,2\n", "x.csv, line 1: a names two columns"),
        ("x.csv", b'prompt,answer\n"a,1\nb,2\n', "none of its rows can be used"),
        ("x.arrow", b"", "there is no row in it"),
        ("x.arrow", bytes(100), "not a whole Arrow file"),
        ("x.arrow", b"no arrow", "not a whole Arrow file"),
        ("x.parquet", b"", "not a whole Parquet file"),
        ("x.parquet", b"PAR1" + b"\x00" * 100 + b"PAR1", "not a whole Parquet file"),
        ("x.txt", b"a", "prompts are read from .jsonl, .json, .csv, .parquet, .arrow files"),
    ],
)
def test_a_file_that_cannot_be_read_at_all_is_refused_whatever_is_done_with_rows(tmp_path, name, content, said):
    file = tmp_path / name
    file.write_bytes(content)
    message = refusal(file, bad_rows="drop")
    assert said in message and str(file) in message


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_truncated_table_is_refused_wherever_it_was_cut(tmp_path, suffix):
    whole = write(tmp_path / f"whole.{suffix}", ROWS * 20).read_bytes()
    file = tmp_path / f"cut.{suffix}"
    for length in (
        5,
        40,
        len(whole) // 3,
        len(whole) // 2,
        len(whole) - 9 if suffix == "parquet" else len(whole) - 200,
    ):
        file.write_bytes(whole[:length])
        assert f"{file}: not a whole " in refusal(file, bad_rows="drop")


def test_a_damaged_part_of_a_parquet_file_costs_its_rows_and_no_other(tmp_path):
    rows = [{"prompt": f"question number {n} " * 9, "answer": "1"} for n in range(60)]
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=20, compression="snappy")
    group = pq.ParquetFile(file).metadata.row_group(1)
    content = bytearray(file.read_bytes())
    start = group.column(0).dictionary_page_offset or group.column(0).data_page_offset
    content[start : start + 30] = b"\xff" * 30
    file.write_bytes(content)
    assert "rows 20 to 39: damaged" in refusal(file)
    loaded = load(file, bad_rows="drop")
    assert [p.index for p in loaded.prompts] == [*range(20), *range(40, 60)]
    assert loaded.notes[0].startswith("data.bad_rows = drop: 20 rows of")


def test_text_of_a_table_that_is_not_utf8_is_found_by_row_and_column(tmp_path):
    texts = pa.array([b"a", b"\xff\xfe", b"c"]).cast(pa.binary())
    broken = pa.Array.from_buffers(pa.string(), 3, texts.buffers())
    pq.write_table(pa.table({"prompt": broken, "answer": ["1", "2", "3"]}), tmp_path / "x.parquet")
    assert "row 1, column prompt: not UTF-8 text" in refusal(tmp_path / "x.parquet")
    assert [p.answer for p in load(tmp_path / "x.parquet", bad_rows="drop").prompts] == ["1", "3"]


def test_bytes_that_are_asked_for_by_name_are_text(tmp_path):
    pq.write_table(pa.table({"prompt": [b"a", b"\xff"], "answer": [b"1", b"2"]}), tmp_path / "x.parquet")
    dataset = DatasetConfig(str(tmp_path / "x.parquet"), extra_columns=())
    assert [(p.text, p.answer) for p in load(dataset, bad_rows="drop").prompts] == [("a", "1")]


def test_a_line_of_ten_megabytes_is_one_overlong_prompt(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_bytes(GOOD + json.dumps({"prompt": "12 " * 3_500_000, "answer": "1"}).encode() + b"\n" + GOOD)
    loaded = load(file)
    assert [p.index for p in loaded.prompts] == [0, 2]
    assert "1 of 3 prompts" in loaded.notes[0] and "the longest has over " in loaded.notes[0]
    table = tmp_path / "x.csv"
    table.write_text("prompt,answer\na,1\n" + "12 " * 3_500_000 + ",1\n")
    assert [p.index for p in load(table).prompts] == [0]


def test_a_long_text_of_few_tokens_is_counted_whole(tmp_path):
    file = write(tmp_path / "x.jsonl", [{"prompt": "a" * 5000 + " b c", "answer": "1"}])
    loaded = load_dataset(DatasetConfig(str(file)), DataConfig(max_prompt_length=4), Words(), 1, "train", None)
    assert len(loaded.prompts[0].token_ids) == 3


def test_a_conversation_that_the_template_refuses_is_a_row_that_cannot_be_used(tmp_path):
    class Strict(Tokenizer):
        def apply_chat_template(self, conversations, **named):
            if any(messages[0]["role"] == "tool" for messages in conversations):
                raise RuntimeError("tools come later")
            return super().apply_chat_template(conversations, **named)

    rows = [*ROWS, {"prompt": [{"role": "tool", "content": "x"}], "answer": "1"}]
    file = tmp_path / "x.jsonl"
    write(file, rows)
    with pytest.raises(
        ValueError, match="row 5 of .*x.jsonl: the template or tokenizer refuses it: RuntimeError: tools"
    ):
        load_dataset(DatasetConfig(str(file)), DataConfig(), Strict(), 1, "train", None)
    loaded = load_dataset(DatasetConfig(str(file)), DataConfig(bad_rows="drop"), Strict(), 1, "train", None)
    assert len(loaded.prompts) == 5


def test_when_no_row_can_be_used_nothing_starts(tmp_path):
    file = write(tmp_path / "x.jsonl", [{"question": "a", "answer": "1"}])
    assert "none of its rows can be used: data.prompt_column = prompt" in refusal(file, bad_rows="drop")


# ---- several sources


def test_a_mix_has_the_prompts_of_all_and_their_weights(tmp_path):
    other = write(tmp_path / "other.jsonl", [{"question": "x", "solution": "1"}])
    yaml = tmp_path / "other.yaml"
    yaml.write_text(f"source: {other}\nprompt_column: question\nanswer_column: solution\n")
    mix = {str(write(tmp_path / "rows.parquet")): 3.0, str(yaml): 1.0, "arithmetic": 0.5}
    config = Config(ModelConfig("m"), DataConfig(mix=mix), train=TrainConfig(prompts_per_step=4))
    loaded = load_prompts(config, Tokenizer(), "train")
    assert loaded.shares == ((5, 3.0), (1, 1.0), (2000, 0.5))
    assert [p.source for p in loaded.prompts[3:7]] == ["rows", "rows", "other", "arithmetic"]
    assert load_prompts(config, Tokenizer(), "eval").prompts == []


# ---- the datasets that come with it


def test_ready_made_datasets_read_the_real_files():
    if not DATA.is_dir():
        pytest.skip(f"{DATA} is not there; set SPMD_RL_TEST_DATA")
    configs = ROOT / "configs" / "datasets"

    def real(name, file, split="train"):
        dataset = load_dataset_config(f"{configs / name}.yaml:{DATA / file}")
        return load_dataset(dataset, DataConfig(), Words(), 1, split, None)

    gsm8k = real("gsm8k", "gsm8k")
    assert len(gsm8k.prompts) == 7473 and gsm8k.notes == []
    assert all(p.answer.removeprefix("-").isdigit() for p in gsm8k.prompts)
    assert sum("," in p.row["answer"].rpartition("####")[2] for p in gsm8k.prompts) == 79
    held_out = real("gsm8k", "gsm8k", "eval")
    assert len(held_out.prompts) == 1319 and held_out.prompts[0].answer == "18"
    assert real("deepscaler", "deepscaler/deepscaler_head803.json").prompts[0].answer == r"-\frac{2}{3}"
    assert set(real("deepscaler", "deepscaler/deepscaler_mixed.json").prompts[0].row) == {"problem", "answer"}
    dapo = [real("dapo_math_17k", f"dapo/dapo_exact_16.{suffix}") for suffix in ("jsonl", "parquet")]
    assert [len(d.prompts) for d in dapo] == [16, 16] and dapo[0].prompts[0].answer == "34"
    assert [(p.token_ids, p.row) for p in dapo[0].prompts] == [(p.token_ids, p.row) for p in dapo[1].prompts]
    assert len(real("verl_parquet", "dapo/dapo_original_schema_1024.parquet").prompts) == 1024
    assert len(real("math_500", "eval/math500_test.jsonl", "eval").prompts) == 500
    assert len(real("aime_2024", "eval/aime24_test.jsonl", "eval").prompts) == 30
    geo = load(DatasetConfig(str(DATA / "geo3k/geo3k_sample.parquet"), prompt_column="problem"))
    assert len(geo.prompts) == 48 and "images holds binary data" in geo.notes[0]


def test_slimes_rows_are_read(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "1+1"}], "label": "2"}, {"prompt": "two", "label": 2}]
    file = write(tmp_path / "slime.json", rows)
    loaded = load(f"{ROOT / 'configs/datasets/slime_jsonl.yaml'}:{file}")
    assert [(p.text, p.answer) for p in loaded.prompts] == [("1+1", "2"), ("two", "2")]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_whatever_bytes_a_file_has_it_gives_prompts_or_an_error_that_names_it(tmp_path, suffix):
    file = tmp_path / f"x.{suffix}"
    if suffix == "csv":
        file.write_text("prompt,answer\n" + "".join(f'"question {n}",{n}\n' for n in range(30)))
    else:
        write(file, ROWS * 6)
    whole, random_ = file.read_bytes(), random.Random(suffix)
    for _ in range(100):
        content = bytearray(whole)
        for _ in range(random_.choice((1, 1, 3, 20))):
            place = random_.randrange(len(content))
            kind = random_.randrange(5)
            if kind < 3:
                content[place] = random_.randrange(256)
            elif kind == 3:
                del content[place : place + random_.randrange(1, 50)]
            else:
                content[place:place] = random_.randbytes(5)
        file.write_bytes(content)
        try:
            loaded = load_dataset(
                DatasetConfig(str(file)), DataConfig(bad_rows="drop", empty_answers="drop"), Words(), 1, "train", None
            )
            assert loaded.prompts
        except ValueError as error:
            assert str(file) in str(error)
