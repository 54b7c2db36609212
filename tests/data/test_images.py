"""Pictures of a data set: as transformers' processor shows them, and what is refused of them."""

import io
import json
import os
import random
import struct
import threading
import time
import zlib
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spmd_rl.config.config import Config, EvaluationConfig, ModelConfig, TrainConfig
from spmd_rl.config.data_config import DataConfig, DatasetConfig
from spmd_rl.config.loading import load_dataset_config
from spmd_rl.data.image_reader import PLACE, ImageReader
from spmd_rl.data.pictures import fetched, pictures_of, size_of
from spmd_rl.data.sources.prompts import load_dataset, load_prompts, with_overrides
from spmd_rl.data.tokens import load_tokenizer
from spmd_rl.errors import ConfigError
from spmd_rl.models.model_shape import read_model_shape
from spmd_rl.runtime.sources import changed_sources, sources
from spmd_rl.runtime.startup import trained_on


def drawn(width=60, height=40, mode="RGB", kind="PNG", seed=0, **options):
    """Bytes of a picture of random colours."""
    colours = np.random.RandomState(seed).randint(0, 255, (height, width, 3), dtype=np.uint8)
    written = io.BytesIO()
    Image.fromarray(colours).convert(mode).save(written, kind, **options)
    return written.getvalue()


def bomb():
    """A PNG of a few bytes whose header says that it has 10^10 pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


def animated(kind):
    frames = [Image.new("RGB", (40, 40), (i * 80, 0, 0)) for i in range(3)]
    written = io.BytesIO()
    frames[0].save(written, kind, save_all=True, append_images=frames[1:])
    return written.getvalue()


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models["qwen2_5_vl"]


def reader(model, **data):
    return ImageReader(model, read_model_shape(model).vision, DataConfig(**data))


def load(model, directory, rows, images=True, **data):
    """Return what becomes of rows whose pictures are files' names -> bytes, written beside them."""
    lines = []
    for number, (pictures, prompt) in enumerate(rows):
        names = []
        for one in pictures:
            if isinstance(one, bytes):
                (directory / f"{number}_{len(names)}").write_bytes(one)
                one = f"{number}_{len(names)}"
            names.append(one)
        lines.append(json.dumps({"images": names, "prompt": prompt, "answer": "7", "id": number}))
    file = directory / "rows.jsonl"
    file.write_text("\n".join(lines) + "\n")
    settings = DataConfig(image_column="images", **({"bad_rows": "drop", "images_per_prompt": 2} | data))
    dataset = DatasetConfig(str(file), image_column="images")
    read = reader(model, images_per_prompt=settings.images_per_prompt) if images else None
    return load_dataset(dataset, settings, load_tokenizer(model), 1, "train", None, read)


def test_token_ids_grids_and_patches_are_those_of_transformers(model, tmp_path):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    random.seed(5)
    sizes = [(random.randint(20, 400), random.randint(20, 400)) for _ in range(24)]
    kinds = [("RGB", "PNG"), ("L", "PNG"), ("P", "PNG"), ("RGBA", "WEBP"), ("CMYK", "JPEG"), ("1", "PNG")]
    files = [drawn(*size, *kinds[i % len(kinds)], seed=i) for i, size in enumerate(sizes)]
    rows = [(files[i : i + 1 + i % 2], "<image>" * (1 + i % 2) + "What is it?") for i in range(0, 24, 2)]
    rows.append(([], "No picture."))
    prompts = load(model, tmp_path, rows).prompts
    assert len(prompts) == len(rows)
    tokenizer, processor = load_tokenizer(model), Qwen2VLImageProcessorPil.from_pretrained(model)
    for prompt, (pictures, text) in zip(prompts, rows, strict=True):
        opened = [Image.open(io.BytesIO(one)).convert("RGB") for one in pictures]
        shown = processor(images=opened, return_tensors="np") if opened else {"image_grid_thw": np.zeros((0, 3))}
        assert np.array_equal(np.array(prompt.grids).reshape(-1, 3), shown["image_grid_thw"])
        # As transformers' Qwen2_5_VLProcessor does it: every image token is repeated, then all is tokenized.
        for grid in shown["image_grid_thw"]:
            pads = "<|image_pad|>" * int(grid.prod() // 4)
            text = text.replace("<image>", f"<|vision_start|>{pads}<|vision_end|>", 1)
        written = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        assert list(prompt.token_ids) == tokenizer(written, add_special_tokens=False)["input_ids"]
        assert prompt.row == {
            "prompt": prompt.text if not pictures else rows[prompt.index][1],
            "answer": "7",
            "id": prompt.index,
        }
        if opened:
            patches, grids = reader(model).patches(prompt.pictures)
            assert np.array_equal(patches, shown["pixel_values"]) and tuple(grids) == prompt.grids


PNG, JPEG = drawn(), drawn(kind="JPEG")
BAD = {
    "a video": ([PNG], "<image><video>", "its prompt says <video>, and no videos are shown"),
    "a truncated PNG": ([PNG[: len(PNG) // 2]], "<image>", "broken or cut off"),
    "a truncated JPEG": ([JPEG[: len(JPEG) // 2]], "<image>", "its end is missing"),
    "a bomb": ([bomb()], "<image>", "too large|pixels, more than"),
    "one pixel": ([drawn(1, 1)], "<image>", "a side is at least 2"),
    "a strip": ([drawn(500, 2)], "<image>", "at most 200 times"),
    "an animated WebP": ([animated("WEBP")], "<image>", "animated, with 3 frames"),
    "a GIF": ([animated("GIF")], "<image>", "no PNG, JPEG, WEBP picture"),
    "text": ([b"hello"], "<image>", "no PNG, JPEG, WEBP picture"),
    "a path outside": (["../../etc/passwd"], "<image>", "outside the data's directory"),
    "an absolute path": (["/etc/passwd"], "<image>", "outside the data's directory"),
    "no such file": (["lost.png"], "<image>", "there is no file"),
    "an address": (["https://example.org/a.png"], "<image>", "nothing is fetched"),
    "a number": ([7], "<image>", "picture 0 is int"),
    "no place": ([PNG], "What is it?", "1 pictures, and its prompt says <image> 0 times"),
    "two places": ([PNG], "<image><image>", "1 pictures, and its prompt says <image> 2 times"),
    "too many": ([PNG, PNG, PNG], "<image><image><image>", "more than data.images_per_prompt = 2"),
    "an image token in the text": ([PNG], "<image><|image_pad|>", "writes 2 image tokens for 1 pictures"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_picture_that_cannot_be_shown_is_dropped_with_a_count_or_refused_with_file_row_and_column(
    model, tmp_path, what
):
    pictures, prompt, said = BAD[what]
    rows = [([PNG], "<image>good"), (pictures, prompt), ([], "good too")]
    loaded = load(model, tmp_path, rows)
    assert [one.index for one in loaded.prompts] == [0, 2]
    assert any("1 rows of" in note for note in loaded.notes)
    with pytest.raises(ValueError, match=said) as refused:
        load(model, tmp_path, rows, bad_rows="refuse")
    assert "row 1 of" in str(refused.value) and "rows.jsonl" in str(refused.value)


@pytest.mark.parametrize("empty", [[], None, float("nan"), "no such column"], ids=str)
def test_rows_of_text_stand_among_those_with_pictures_however_a_table_spells_that_there_is_none(model, tmp_path, empty):
    (tmp_path / "a.png").write_bytes(PNG)
    text = {"prompt": "2 + 2", "answer": "4"} | ({} if empty == "no such column" else {"images": empty})
    rows = [text, {"prompt": "<image>Q", "answer": "7", "images": ["a.png"]}, text]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = DatasetConfig(str(tmp_path / "rows.jsonl"), image_column="images")
    loaded = load_dataset(dataset, DataConfig(), load_tokenizer(model), 1, "train", None, reader(model))
    assert [len(prompt.pictures) for prompt in loaded.prompts] == [0, 1, 0] and loaded.notes == []


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_messages_in_parts_show_pictures_where_a_part_is_one(model, tmp_path, kind):
    (tmp_path / "a.png").write_bytes(PNG)
    shown, text = {"type": "image"}, "Which colour has it?"
    rows = [
        {"prompt": [{"role": "user", "content": [shown, {"type": "text", "text": text}]}], "images": ["a.png"]},
        {"prompt": [{"role": "user", "content": [{"type": "text", "text": text}]}], "images": []},
    ]
    file = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row | {"answer": "7"}) + "\n" for row in rows))
    else:  # each part has all keys
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist([row | {"answer": "7"} for row in rows]), file)
    (tmp_path / "as_text.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"{PLACE * len(row['images'])}{text}", "images": row["images"], "answer": "7"}) + "\n"
            for row in rows
        )
    )
    read = (DataConfig(), load_tokenizer(model), 1, "train", None, reader(model))
    found, expected = (
        load_dataset(DatasetConfig(str(one), image_column="images"), *read)
        for one in (file, tmp_path / "as_text.jsonl")
    )
    assert [prompt.token_ids for prompt in found.prompts] == [prompt.token_ids for prompt in expected.prompts]
    assert [prompt.grids for prompt in found.prompts] == [prompt.grids for prompt in expected.prompts]


def test_a_part_that_brings_its_own_picture_is_refused_and_a_video_too(model, tmp_path):
    file = tmp_path / "rows.jsonl"
    for part, said in (
        ({"type": "image", "image": "a.png"}, "for pictures of data.image_column"),
        ({"type": "video"}, "no videos are shown"),
    ):
        file.write_text(json.dumps({"prompt": [{"role": "user", "content": [part]}], "answer": "7", "images": []}))
        dataset = DatasetConfig(str(file), image_column="images")
        with pytest.raises(ValueError, match=said):
            load_dataset(dataset, DataConfig(), load_tokenizer(model), 1, "train", None, reader(model))


def test_prompts_that_say_image_without_a_column_of_pictures_are_told_of(model, tmp_path):
    rows = [{"prompt": "<image>Q", "answer": "7"}, {"prompt": "2 + 2", "answer": "4"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = (DataConfig(), load_tokenizer(model), 1, "train", None, reader(model))
    [note] = load_dataset(DatasetConfig(str(tmp_path / "rows.jsonl")), *read).notes
    assert note == "1 of 2 prompts say <image> and show no picture: data.image_column names their column"


def test_a_column_that_is_not_there_is_told_of(model, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "2 + 2", "answer": "4", "images": ["a.png"]}) + "\n")
    dataset = DatasetConfig(str(tmp_path / "rows.jsonl"), image_column="image")
    read = (DataConfig(), load_tokenizer(model), 1, "train", None, reader(model))
    assert load_dataset(dataset, *read).notes == ["data.image_column = image: none of the 1 prompts shows a picture"]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "<image>Q", "answer": "4", "images": ["a.png"]}) + "\n")
    with pytest.raises(ValueError, match="no such column; it has prompt, answer, images"):
        load_dataset(dataset, *read)


def test_a_prompt_that_its_pictures_make_too_long_is_left_out_and_never_cut(model, tmp_path):
    rows = [([drawn()], "<image>Q"), ([drawn(800, 600)], "<image>Q"), ([], "Q")]
    loaded = load(model, tmp_path, rows, max_prompt_length=64)
    assert [prompt.index for prompt in loaded.prompts] == [0, 2]
    assert any("1 of 3" in note for note in loaded.notes), loaded.notes
    with pytest.raises(ValueError, match="data.max_prompt_length = 64"):
        load(model, tmp_path, rows, max_prompt_length=64, overlong_prompts="refuse")


@pytest.mark.parametrize("size", [(2, 2), (3, 2), (27, 257), (2, 399)], ids=str)
def test_pictures_smaller_than_a_patch_are_enlarged_as_transformers_does(model, size):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    content = drawn(*size)
    patches, grids = reader(model).patches(pictures_of(content, Path()))
    assert grids == [reader(model).grid(*size)] and min(grids[0][1:]) >= 2
    shown = Qwen2VLImageProcessorPil.from_pretrained(model)(
        images=[Image.open(io.BytesIO(content))], return_tensors="np"
    )
    assert np.array_equal(patches, shown["pixel_values"])


def test_the_same_question_of_other_pictures_is_another_problem(model, tmp_path):
    rows = [([drawn(seed=i)], "<image>Which colour?") for i in range(30)] + [([], "2 + 2"), ([], "2 + 2")]
    load(model, tmp_path, rows)
    data = DataConfig(source=str(tmp_path / "rows.jsonl"), image_column="images")
    evaluation, train = EvaluationConfig(every_steps=1), TrainConfig(prompts_per_step=2)
    config = Config(ModelConfig(model), data, evaluation=evaluation, train=train)
    tokenizer, read = load_tokenizer(model), reader(model)
    train, held = (load_prompts(config, tokenizer, split, images=read).prompts for split in ("train", "eval"))
    assert 0 < len(held) < 15 and len({prompt.text for prompt in held if prompt.pictures}) == 1
    assert {prompt.problem for prompt in train}.isdisjoint(prompt.problem for prompt in held)
    assert sum(bool(prompt.pictures) for prompt in (*train, *held)) == 30
    assert trained_on({"train": train, "eval": held}, {"eval": "colours"}) == []
    assert len(trained_on({"train": train, "eval": [*held, train[0]]}, {"eval": "colours"})) == 1


def test_a_run_knows_when_its_pictures_are_others(model, tmp_path):
    rows = [([drawn(seed=1)], "<image>Q"), ([], "text")]
    before = sources(load(model, tmp_path, rows).prompts, {})
    assert before == sources(load(model, tmp_path, rows).prompts, {})
    assert changed_sources(before, before, [], []) == ([], [])
    after = sources(load(model, tmp_path, [([drawn(seed=2)], "<image>Q"), *rows[1:]]).prompts, {})
    [problem] = changed_sources(before, after, [], [])[1]
    assert problem.knob == "data.image_column" and "the pictures that its prompts show" in str(problem)


def test_parquet_files_hold_pictures_as_bytes(model, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {"images": [{"bytes": drawn(seed=i), "path": None}], "problem": "<image>Q", "answer": "1"} for i in range(3)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    dataset = DatasetConfig(str(tmp_path / "rows.parquet"), prompt_column="problem", image_column="images")
    loaded = load_dataset(dataset, DataConfig(), load_tokenizer(model), 1, "train", None, reader(model))
    assert [one.pictures[0].read() for one in loaded.prompts] == [row["images"][0]["bytes"] for row in rows]
    assert all("images" not in one.row for one in loaded.prompts)


def test_pictures_in_the_run_of_a_model_of_text_are_refused(model, tmp_path):
    with pytest.raises(ConfigError, match="data.image_column = images: .*the model sees none"):
        load(model, tmp_path, [([PNG], "<image>")], images=False)


def test_limits_of_pixels_are_those_of_the_settings_before_the_models(model):
    assert reader(model).grid(100, 100) == (1, 8, 8)
    assert reader(model, image_max_pixels=56 * 56).grid(100, 100) == (1, 4, 4)
    assert reader(model, image_min_pixels=224 * 224).grid(100, 100) == (1, 16, 16)
    with pytest.raises(ConfigError, match="data.image_min_pixels = 6000: .*at least 6000 pixels and at most 5000"):
        reader(model, image_min_pixels=6000, image_max_pixels=5000)
    with pytest.raises(ConfigError, match="data.image_max_pixels = 5: .*at most 5"):
        reader(model, image_max_pixels=5)


def test_the_samples_of_geometry3k_are_those_of_transformers(model):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    root = Path(__file__).parents[2]
    file = Path(os.environ.get("SPMD_RL_TEST_DATA", root.parent / "shared" / "data")) / "geo3k/geo3k_sample.parquet"
    if not file.exists():
        pytest.skip(f"{file.name} is not in SPMD_RL_TEST_DATA or ../shared/data")
    dataset = DatasetConfig(str(file), prompt_column="problem", image_column="images")
    prompts = load_dataset(dataset, DataConfig(), load_tokenizer(model), 1, "train", None, reader(model)).prompts
    assert len(prompts) == 48
    processor = Qwen2VLImageProcessorPil.from_pretrained(model)
    for prompt in prompts:
        opened = [Image.open(io.BytesIO(one.read())).convert("RGB") for one in prompt.pictures]
        shown = processor(images=opened, return_tensors="np")
        patches, grids = reader(model).patches(prompt.pictures)
        assert tuple(grids) == prompt.grids == tuple(map(tuple, shown["image_grid_thw"].tolist()))
        assert np.array_equal(patches, shown["pixel_values"])
        assert prompt.token_ids.count(512) == shown["image_grid_thw"].prod(-1).sum() // 4


@pytest.fixture
def server():
    """Address of a server of pictures; /slow sends a byte now and then, /large has no end."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path != "/none" else 404)
            self.end_headers()
            try:
                for _ in range(400 if self.path in ("/slow", "/large") else 0):
                    self.wfile.write(b"x" * (1 if self.path == "/slow" else 100_000))
                    time.sleep(0.02)
                self.wfile.write(drawn())
            except OSError:
                pass

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_addresses_are_fetched_where_that_is_asked_for_within_limits(server):
    fetch = partial(fetched, seconds=0.3, most_bytes=1_000_000)
    assert size_of(pictures_of(f"{server}/square.png", Path(), fetch)[0]) == (60, 40)
    for path, said in (("slow", "more than 0.3 s"), ("large", "more than 1000000 bytes"), ("none", "404")):
        with pytest.raises(ValueError, match=f"cannot be fetched: .*{said}"):
            pictures_of(f"{server}/{path}", Path(), fetch)
    with pytest.raises(ValueError, match="nothing is fetched"):
        pictures_of("file:///etc/passwd", Path(), fetch)
    with pytest.raises(ValueError, match="nothing is fetched"):
        pictures_of(f"{server}/square.png", Path())


def test_verls_rows_of_geometry3k_are_read_with_their_pictures(model, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": "<image>Find x. Answer in \\boxed{}."}],
        "images": [{"bytes": PNG, "path": None}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 0, "answer": "3", "question": "<image>Find x."},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    dataset = load_dataset_config(f"verl_parquet:{tmp_path / 'train.parquet'}")
    data = DataConfig(image_column="images")
    loaded = load_dataset(with_overrides(dataset, data), data, load_tokenizer(model), 1, "train", None, reader(model))
    [prompt] = loaded.prompts
    assert prompt.answer == "3" and len(prompt.pictures) == 1 and prompt.token_ids.count(512) == prompt.patches // 4
