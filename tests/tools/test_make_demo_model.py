"""The demo model: complete or absent, and with the tokenizer it was trained with."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "make_demo_model.py"
DATA = Path(os.environ.get("SPMD_RL_TEST_DATA", ROOT.parent / "shared" / "data"))


def run(*arguments):
    return subprocess.run([sys.executable, TOOL, *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("make_demo_model", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    """A GGUF file of a model with two tiny layers, whose vocabulary spells digits and runs of spaces."""
    import gguf
    import numpy as np
    from tokenizers.pre_tokenizers import ByteLevel

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = [*special, *sorted(ByteLevel.alphabet()), "ĠĠ", "Ġ1", "12"]
    hidden, heads, ffn, layers = 32, 2, 64, 2
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(words))
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3] * 3 + [1] * (len(words) - 3))
    writer.add_token_merges(["Ġ Ġ", "Ġ 1", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}")
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(words), hidden), "output_norm": (hidden,)}
    for layer in range(layers):
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_norm": (hidden,),
                "ffn_norm": (hidden,),
                "attn_q": (hidden, hidden),
                "attn_k": (hidden // heads, hidden),
                "attn_v": (hidden // heads, hidden),
                "attn_output": (hidden, hidden),
                "ffn_gate": (ffn, hidden),
                "ffn_up": (ffn, hidden),
                "ffn_down": (hidden, ffn),
            }.items()
        }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def made(gguf, tmp_path_factory):
    output = tmp_path_factory.mktemp("made") / "models" / "demo"
    done = run("--output", output, "--gguf", gguf)
    assert done.returncode == 0, done.stderr
    return output


@pytest.mark.long
def test_a_gguf_file_becomes_a_model_directory_that_says_what_it_is(made, tool):
    from spmd_rl.models.model_shape import read_model_shape

    assert [name for name in tool.FILES if not (made / name).is_file()] == []
    assert [path.name for path in made.parent.iterdir()] == ["demo"]
    shape = read_model_shape(made)
    assert (shape.family, shape.layers, shape.heads, shape.kv_heads, shape.tied) == ("llama", 2, 2, 1, True)
    assert (shape.max_positions, shape.rope_theta, shape.eos_token_ids) == (128, 1e5, (2,))
    assert json.loads((made / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.long
def test_its_tokenizer_splits_numbers_into_digits_before_anything_else(made):
    from spmd_rl.data.tokens import load_tokenizer, render

    tokenizer = load_tokenizer(str(made))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("  12")) == ["ĠĠ", "1", "2"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert render(tokenizer, [{"role": "user", "content": "1"}])[0] == 1


def test_a_complete_directory_is_left_alone_at_once(tmp_path, tool):
    for name in tool.FILES:
        (tmp_path / name).write_text(name)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    command = [sys.executable, "-X", "importtime", TOOL, "--output", tmp_path, "--gguf", TOOL]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "is complete" in done.stdout) == (0, True)
    assert not re.search(r"\b(torch|transformers|numpy)$", done.stderr, re.MULTILINE), "it loads nothing for that"
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_an_incomplete_directory_is_refused_and_not_touched(tmp_path, gguf):
    (tmp_path / "config.json").write_text("{}")
    done = run("--output", tmp_path, "--gguf", gguf)
    assert done.returncode != 0
    assert "not a complete model (missing: generation_config.json, model.safetensors" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_failure_leaves_nothing_behind(tmp_path, tool):
    def fail(directory):
        (directory / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tool.from_scratch(tmp_path / "demo", tool.FILES, fail)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_gguf_file_is_named(tmp_path):
    done = run("--output", tmp_path / "demo", "--gguf", tmp_path / "none.gguf")
    assert "none.gguf: there is no such file" in done.stderr


@pytest.mark.spmd
def test_a_tiny_model_is_the_same_every_time_and_takes_a_tokenizer(tmp_path, made):
    arguments = ["--tiny", "qwen3", "--tied", "--layers", 1, "--vocabulary", 300, "--tokenizer", made]
    assert run("--output", tmp_path / "a", *arguments).returncode == 0
    assert run("--output", tmp_path / "b", *arguments).returncode == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (made / "tokenizer.json").read_bytes()


@pytest.mark.slow
def test_the_demo_models_tokenizer_gives_the_golden_ids(smollm2):
    from spmd_rl.data.tokens import decode, load_tokenizer

    golden = DATA / "smollm2_tokenizer" / "golden_ids.json"
    if not golden.exists():
        pytest.skip(f"{golden} is not there")
    tokenizer = load_tokenizer(smollm2)
    cases = json.loads(golden.read_text())
    assert len(cases) == 29
    assert [case["text"] for case in cases if tokenizer.encode(case["text"]) != case["ids"]] == []
    assert [case["text"] for case in cases if decode(tokenizer, case["ids"], special=True) != case["text"]] == []
