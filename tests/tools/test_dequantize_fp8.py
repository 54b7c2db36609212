"""tools/dequantize_fp8.py, on weights that are written out."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("dequantize_fp8", ROOT / "tools" / "dequantize_fp8.py")
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)

# A weight of 3 x 5 in blocks of 2 x 2: the last row and the last column are blocks of their own.
STORED = [[1.0, -2.0, 0.5, 448.0, 1.0], [0.0, 3.5, -1.0, 2.0, 1.0], [4.0, 1.0, -8.0, 0.25, 16.0]]
SCALES = [[2.0, 0.5, 10.0], [1.0, 0.25, 0.125]]
MEANT = [[2.0, -4.0, 0.25, 224.0, 10.0], [0.0, 7.0, -0.5, 1.0, 10.0], [4.0, 1.0, -2.0, 0.0625, 2.0]]
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 1,
    "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 2]},
}
NAME = "model.layers.0.mlp.down_proj.weight"


def fp8(rows):
    return torch.tensor(rows).to(torch.float8_e4m3fn)


@pytest.fixture
def published(tmp_path):
    """A directory of two files; the scales of a weight are in the other one."""
    source = tmp_path / "fp8"
    source.mkdir()
    one = {NAME: fp8(STORED), "model.norm.weight": torch.tensor([1.5], dtype=torch.bfloat16)}
    one["model.layers.0.mlp.gate.e_score_correction_bias"] = torch.tensor([0.1])
    two = {NAME + "_scale_inv": torch.tensor(SCALES), "model.layers.1.eh_proj.weight": fp8([[1.0]])}
    two["lm_head.weight"] = torch.tensor([[0.5]], dtype=torch.bfloat16)
    save_file(one, source / "model-00001-of-00002.safetensors")
    save_file(two, source / "model-00002-of-00002.safetensors")
    files = {name: f"model-0000{n}-of-00002.safetensors" for n, part in enumerate((one, two), 1) for name in part}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (source / "config.json").write_text(json.dumps(CONFIG))
    (source / "tokenizer.json").write_text("{}")
    return source


def test_every_weight_is_the_stored_one_times_the_scale_of_its_block(published, tmp_path, capsys):
    output = tmp_path / "bf16"
    assert tool.main([str(published), "--output", str(output)]) == 0
    held = {}
    for file in output.glob("*.safetensors"):
        held |= load_file(file)
    assert held[NAME].dtype == torch.bfloat16 and held[NAME].tolist() == MEANT
    assert held["model.norm.weight"].dtype == torch.bfloat16
    bias = held["model.layers.0.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32 and bias.tolist() == pytest.approx([0.1])
    index = json.loads((output / "model.safetensors.index.json").read_text())["weight_map"]
    assert held.keys() == index.keys() and not any(name.endswith("_scale_inv") for name in held)
    config = json.loads((output / "config.json").read_text())
    assert "quantization_config" not in config and config["torch_dtype"] == "bfloat16"
    assert (output / "tokenizer.json").exists() and not list(output.glob("*.partial"))
    said = capsys.readouterr().out
    assert "left out: 1 tensors of layers for the prediction of several tokens, from model.layers.1 on" in said
    assert config["num_nextn_predict_layers"] == 0 and "model.layers.1.eh_proj.weight" not in held


def test_rows_are_read_a_few_at_a_time_and_give_the_same(published, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "ROW_BLOCKS", 1)
    tool.convert(published, tmp_path / "bf16")
    assert load_file(tmp_path / "bf16" / "model-00001-of-00002.safetensors")[NAME].tolist() == MEANT


def test_the_same_command_goes_on_and_a_finished_directory_is_left_alone(published, tmp_path, capsys):
    output = tmp_path / "bf16"
    output.mkdir()
    (output / "model-00001-of-00002.safetensors.partial").write_text("cut off")
    assert tool.main([str(published), "--output", str(output)]) == 0
    assert load_file(output / "model-00001-of-00002.safetensors")[NAME].tolist() == MEANT
    assert tool.main([str(published), "--output", str(output)]) == 2
    assert "there is a model already; name another directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda source: (source / "config.json").unlink(), "there is no config.json in it"),
        (
            lambda source: (source / "config.json").write_text('{"num_hidden_layers": 1}'),
            "quantization_config in its config.json says nothing; this reads quant_method fp8",
        ),
        (
            lambda source: (source / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {NAME: "model-00001-of-00002.safetensors"}})
            ),
            f"{NAME} is in FP8 and has no {NAME}_scale_inv",
        ),
    ],
)
def test_what_it_cannot_read_is_named(published, tmp_path, capsys, change, said):
    change(published)
    assert tool.main([str(published), "--output", str(tmp_path / "bf16")]) == 2
    assert said in capsys.readouterr().err


def test_scales_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"has \(2, 3\) blocks, and scales of \(2, 2\)"):
        tool.dequantized(fp8(STORED), torch.ones(2, 2), (2, 2))
