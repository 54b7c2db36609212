"""Prepared prompts are the raw file's, and are refused where they would not be the model's."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from spmd_rl.config.data_config import DataConfig
from spmd_rl.config.loading import load_dataset_config
from spmd_rl.data.image_reader import ImageReader
from spmd_rl.data.sources.prepared import is_prepared
from spmd_rl.data.sources.prompts import load_dataset
from spmd_rl.data.tokens import load_tokenizer
from spmd_rl.models.model_shape import read_model_shape
from tiny_models import make_tiny
from tiny_tokenizer import make_tokenizer

TOOL = Path(__file__).parents[2] / "tools" / "preprocess_data.py"
ROWS = [
    {"question": f"What is {n} + 1? ça va", "answer": f"so it is\n#### {n + 1:,}", "level": n, "tags": ["x"]}
    for n in range(995, 1010)
]
BAD = [
    {"question": "no answer", "answer": ""},
    {"question": "a" * 5000, "answer": "#### 1"},
    {"question": 7, "answer": "#### 1"},
    ROWS[0] | {"question": "again"},
]
YAML = "source: {}\nprompt_column: question\nanswer_pattern: '#### (.+)'\nanswer_without: ','\ndeduplicate: level\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tokenizer(path)
    return path


@pytest.fixture
def config(tmp_path):
    # Rows without a level are told apart too, which deduplicate wants.
    rows = ROWS + [{"level": -n} | row for n, row in enumerate(BAD, 1)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "rows.yaml"
    file.write_text(YAML.format(tmp_path / "rows.jsonl"))
    return file


@pytest.fixture
def prepare(config, model, tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("preprocess_data", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    def run(*arguments, output=tmp_path / "out.parquet"):
        written = [] if output is None else ["--output", str(output)]
        argv = ["--config", str(config), "--model", str(model), *written, "--workers", "1", *arguments]
        monkeypatch.setattr(sys, "argv", ["preprocess_data.py", *argv])
        try:
            tool.main()
        except SystemExit as ended:
            assert ended.code == 2
            return capsys.readouterr().err
        return capsys.readouterr().out

    return run


def load(source, model, **data):
    data = {"bad_rows": "drop", "empty_answers": "drop"} | data
    dataset = load_dataset_config(str(source))
    return load_dataset(dataset, DataConfig(**data), load_tokenizer(str(model)), 1, "train", None)


def prompts(loaded):
    return [(p.index, p.token_ids, p.text, p.answer, p.row) for p in loaded.prompts]


@pytest.mark.long
def test_prepared_prompts_are_those_of_the_raw_file(prepare, config, model, tmp_path):
    prepare()
    assert is_prepared(str(tmp_path / "out.parquet")) and not is_prepared(str(config))
    raw, made = load(config, model), load(tmp_path / "out.parquet", model)
    assert prompts(made) == prompts(raw) and len(raw.prompts) == 15
    assert made.prompts[5].answer == "1001" and made.notes == []
    assert [len(p.token_ids) for p in made.prompts] == pq.read_table(tmp_path / "out.parquet")[
        "prompt_tokens"
    ].to_pylist()
    limit = max(len(p.token_ids) for p in raw.prompts) - 1
    short = [load(source, model, max_prompt_length=limit) for source in (config, tmp_path / "out.parquet")]
    assert prompts(short[0]) == prompts(short[1]) and len(short[0].prompts) < 15


@pytest.mark.spmd
def test_workers_give_what_one_process_gives(prepare, config, model, tmp_path):
    rows = [{"question": f"{n}?", "answer": f"#### {n}", "level": n} for n in range(1200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare()
    command = [sys.executable, TOOL, "--config", config, "--model", model, "--output", tmp_path / "two.parquet"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--workers", "2"], env=environment, check=True, capture_output=True, timeout=300)
    assert pq.read_table(tmp_path / "two.parquet").equals(pq.read_table(tmp_path / "out.parquet"), check_metadata=True)


def test_the_summary_says_what_was_dropped_and_why_and_shows_what_the_model_sees(prepare):
    out = prepare("--show", "2")
    assert "rows.jsonl: 19 rows, 15 prompts kept" in out
    for line in (
        "dropped, duplicate: 1",
        "dropped, empty answer: 1",
        "dropped, overlong: 1",
        "dropped, cannot be used: 1",
    ):
        assert line in out
    assert "row 17 of" in out and "holds int" in out
    assert (
        out.lstrip().startswith("---- 0: row 0 of ")
        and "answer: 996\n<|im_start|>user\nWhat is 995 + 1? ça va<|im_end|>" in out
    )
    assert out.count("---- ") == 2
    bars = [line for line in out.splitlines() if " to " in line and line.startswith("  ")]
    assert sum(int(line.split()[3]) for line in bars) == 15


def test_nothing_is_written_over_without_force(prepare, tmp_path):
    prepare()
    assert "it exists already; name another file, or add --force" in prepare()
    assert "written: " in prepare("--force")
    assert not (tmp_path / "out.parquet.partial").exists()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--bad-rows", "refuse"], "row 17 of "),
        (["--empty-answers", "refuse"], "data.empty_answers = refuse: 1 of 17 rows"),
        (["--template", "qwen_r2"], "did you mean qwen_r1?"),
        (["--enable-thinking", "false"], "the template does not know it"),
        (["--workers", "0"], "--workers 0: it must be 1 or more"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: No such file or directory"),
        (["--model", "/nowhere"], "there is no tokenizer in it"),
        (["--output", "/nowhere/x.parquet"], "in a directory that exists"),
        (["--output", "x.jsonl"], "expected a .parquet file"),
    ],
)
def test_what_cannot_be_done_is_said(prepare, arguments, said, tmp_path):
    assert said in prepare(*arguments)
    assert not (tmp_path / "out.parquet").exists()


def test_another_tokenizer_or_template_is_refused(prepare, model, tmp_path):
    prepare()
    made = tmp_path / "out.parquet"
    other = tmp_path / "other"
    make_tokenizer(other, vocabulary=300)
    with pytest.raises(ValueError, match="out.parquet: its token ids are another tokenizer's than model.path's"):
        load(made, other)
    make_tokenizer(other)
    load(made, other)
    template = other / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    with pytest.raises(ValueError, match="prepared with another chat template than the one in model.path now"):
        load(made, other)
    for setting, said in (
        ({"template": "qwen"}, "data.template = qwen: .* was prepared with the template chat"),
        ({"template": "plain"}, "data.template = plain: "),
        ({"system": "be brief"}, "data.system = 'be brief': .* was prepared with None"),
        ({"enable_thinking": True}, "data.enable_thinking = True: .* was prepared with None"),
    ):
        with pytest.raises(ValueError, match=said):
            load(made, model, **setting)
    load(made, model, template="chat")


def test_a_named_template_stays_with_the_prepared_prompts(prepare, config, model, tmp_path):
    prepare("--template", "qwen3", "--enable-thinking", "false", "--system", "be brief")
    made = load(tmp_path / "out.parquet", model)
    setting = {"template": "qwen3", "enable_thinking": False, "system": "be brief"}
    assert prompts(made) == prompts(load(config, model, **setting))
    assert made.notes == [f"{tmp_path / 'out.parquet'}: its prompts were prepared with the template qwen3"]
    assert {prompt.template for prompt in made.prompts} == {"qwen3"}
    assert prompts(load(tmp_path / "out.parquet", model, **setting)) == prompts(made)
    assert "it is prepared already" in prepare("--config", str(tmp_path / "out.parquet"), output=tmp_path / "2.parquet")


def test_a_prepared_file_that_was_cut_is_refused(prepare, model, tmp_path):
    prepare()
    made = tmp_path / "out.parquet"
    made.write_bytes(made.read_bytes()[:-100])
    with pytest.raises(ValueError, match="out.parquet: not a whole Parquet file"):
        load(made, model)


@pytest.fixture
def seeing(config, tmp_path):
    """Return arguments for a model that sees, and rows that show a picture each, none, two, or one that is lost."""
    Image.new("RGB", (56, 84), "red").save(tmp_path / "red.png")
    Image.new("RGB", (84, 84), "blue").save(tmp_path / "blue.jpg")
    rows = [{"problem": "<image>Which colour?", "pictures": ["red.png"], "answer": "red"}] * 3
    rows += [{"problem": "None?", "pictures": [], "answer": "none"}]
    rows += [{"problem": "<image>Lost?", "pictures": ["lost.png"], "answer": "x"}]
    rows += [{"problem": "<image>or<image>?", "pictures": ["blue.jpg", "red.png"], "answer": "y", "level": 3}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.write_text(f"source: {tmp_path}/rows.jsonl\nprompt_column: problem\nimage_column: pictures\n")
    make_tokenizer(make_tiny(tmp_path / "seeing", "qwen2_5_vl"), vision=True)
    return "--model", str(tmp_path / "seeing"), "--config", str(config)


def looked_at(source, model, **data):
    """Return what a run of a model that sees makes of a source."""
    settings = DataConfig(**({"bad_rows": "drop", "images_per_prompt": 2} | data))
    reader = ImageReader(str(model), read_model_shape(str(model)).vision, settings)
    dataset = load_dataset_config(str(source))
    return load_dataset(dataset, settings, load_tokenizer(str(model)), 1, "train", None, reader), reader


def shown(loaded):
    """Return of each prompt all that a run uses of it, its pictures by their files' bytes."""
    return [
        (*one, prompt.grids, prompt.pictures_digest, [picture.read() for picture in prompt.pictures])
        for one, prompt in zip(prompts(loaded), loaded.prompts, strict=True)
    ]


def test_pictures_are_counted_and_shown_on_one_sheet(prepare, seeing, tmp_path):
    said = prepare(*seeing, "--contact-sheet", str(tmp_path / "sheet.png"), output=None)
    assert "4 prompts kept" in said and "dropped, cannot be used: 2" in said
    assert "pictures: 3; patches: 72 in all, 24 in a prompt at most; image tokens: 18 in all, 6 in a prompt" in said
    assert Image.open(tmp_path / "sheet.png").size == (960, 174)
    assert "as data.image_urls" not in said and "--image-max-pixels 0: it must be 1" in prepare(
        *seeing, "--image-max-pixels", "0"
    )


def test_prepared_prompts_with_pictures_are_those_of_the_raw_file_wherever_they_stand(
    prepare, seeing, config, tmp_path
):
    said = prepare(*seeing, "--images-per-prompt", "2")
    assert f"{tmp_path / 'out.pictures'}, the pictures; the two go together" in said
    raw, _ = looked_at(config, tmp_path / "seeing")
    assert [len(prompt.pictures) for prompt in raw.prompts] == [1, 1, 1, 0, 2]
    (tmp_path / "moved").mkdir()
    shutil.copytree(tmp_path / "out.pictures", tmp_path / "moved" / "out.pictures")
    shutil.copy(tmp_path / "out.parquet", tmp_path / "moved" / "other.parquet")
    for file in ("out.parquet", "moved/other.parquet"):
        made, _ = looked_at(tmp_path / file, tmp_path / "seeing", image_column="pictures")
        assert shown(made) == shown(raw) and made.notes == []
    assert {file.suffix for file in (tmp_path / "out.pictures").iterdir()} == {".png", ".jpg"}
    assert len(list((tmp_path / "out.pictures").iterdir())) == 2, "one that is shown five times is there once"


def test_prepared_pictures_that_a_run_would_show_otherwise_are_refused(prepare, seeing, config, tmp_path):
    prepare(*seeing, "--images-per-prompt", "2")
    made, model = tmp_path / "out.parquet", tmp_path / "seeing"
    with pytest.raises(ValueError, match="row 0 of .*: its pictures become .*data.image_min_pixels"):
        looked_at(made, model, image_min_pixels=224 * 224)
    with pytest.raises(ValueError, match="row 4 of .*more than data.images_per_prompt = 1"):
        looked_at(made, model, images_per_prompt=1, bad_rows="refuse")
    with pytest.raises(ValueError, match="its prompts show pictures, and the model sees none"):
        load(made, model)
    lost = next(file for file in (tmp_path / "out.pictures").iterdir() if file.suffix == ".jpg")
    lost.write_bytes(lost.read_bytes()[:-200])
    with pytest.raises(ValueError, match="row 4 of .*cut off.*go together; fix it, or set data.bad_rows"):
        looked_at(made, model, bad_rows="refuse")
    left, _ = looked_at(made, model)
    assert [prompt.index for prompt in left.prompts] == [0, 1, 2, 3] and "1 rows of" in left.notes[0]
    shutil.rmtree(tmp_path / "out.pictures")
    with pytest.raises(ValueError, match="row 0 of .*there is no file .*out.pictures/"):
        looked_at(made, model, bad_rows="refuse")


def test_the_samples_of_geometry3k_are_the_same_prepared_and_raw(prepare, seeing, config, tmp_path):
    root = Path(__file__).parents[2]
    file = Path(os.environ.get("SPMD_RL_TEST_DATA", root.parent / "shared" / "data")) / "geo3k/geo3k_sample.parquet"
    if not file.exists():
        pytest.skip(f"{file.name} is not in SPMD_RL_TEST_DATA or ../shared/data")
    config.write_text(f"source: {file}\nprompt_column: problem\nimage_column: images\n")
    prepare(*seeing)
    raw, reader = looked_at(config, tmp_path / "seeing")
    made, _ = looked_at(tmp_path / "out.parquet", tmp_path / "seeing")
    assert shown(made) == shown(raw) and len(raw.prompts) == 48
    for before, after in zip(raw.prompts, made.prompts, strict=True):
        assert np.array_equal(reader.patches(before.pictures)[0], reader.patches(after.pictures)[0])
