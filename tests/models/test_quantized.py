"""Test what a run says of a directory whose weights it will not export as they are."""

import json

import pytest

from spmd_rl.models.quantized import block_size, export_notes


@pytest.mark.parametrize(
    ("config", "block", "said"),
    [
        ({}, None, ()),
        ({"num_nextn_predict_layers": 0}, None, ()),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]}},
            (64, 128),
            ("blocks of 64 x 128 as they are read; vLLM and what is exported have them without float8",),
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}, "num_nextn_predict_layers": 1},
            (128, 128),
            ("blocks of 128 x 128", "num_nextn_predict_layers = 1: layers that predict several tokens are neither"),
        ),
    ],
)
def test_a_run_says_what_its_export_will_not_have(tmp_path, config, block, said):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert block_size(tmp_path) == block
    lines = export_notes(tmp_path)
    assert len(lines) == len(said) and all(part in line for part, line in zip(said, lines, strict=True))


def test_a_directory_without_a_readable_config_says_nothing(tmp_path):
    assert export_notes(tmp_path) == [] and block_size(tmp_path / "nowhere") is None
    for content in ("{", "[]"):
        (tmp_path / "config.json").write_text(content)
        assert export_notes(tmp_path) == []
