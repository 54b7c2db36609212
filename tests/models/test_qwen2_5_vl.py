"""Qwen2.5-VL's config.json in both spellings, its rotary positions, and its tensors in both spellings."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from spmd_rl.distributed.layout import TrainLayout
from spmd_rl.errors import ConfigError
from spmd_rl.models.model_shape import read_model_shape
from spmd_rl.models.qwen2_5_vl import positions
from spmd_rl.weights.families import hf_tensors, megatron_shard
from spmd_rl.weights.files.convert import compare, to_hf, to_megatron
from spmd_rl.weights.files.export import export_hf
from spmd_rl.weights.files.hf_reader import load_shard

# Qwen2.5-VL-3B-Instruct, as published.
PUBLISHED = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}


def write(directory, content):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(content))
    return directory


def test_a_published_config_is_read_and_means_the_same_as_what_transformers_saves_of_it(tmp_path):
    from transformers import AutoConfig

    published = read_model_shape(write(tmp_path / "published", PUBLISHED))
    assert (published.layers, published.hidden, published.heads, published.kv_heads) == (36, 2048, 16, 2)
    assert (published.tied, published.qkv_bias, published.rope_theta, published.rope_scaling) == (True, True, 1e6, None)
    assert published.rope_axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    vision = published.vision
    assert (vision.layers, vision.hidden, vision.heads, vision.ffn, vision.merged) == (32, 1280, 16, 3420, 5120)
    assert (vision.image_token, vision.patch_elements) == (151655, 1176)
    assert sum(map(math.prod, hf_tensors(published).values())) / 1e9 == pytest.approx(3.755, abs=0.001)
    AutoConfig.from_pretrained(tmp_path / "published").save_pretrained(tmp_path / "saved")
    content = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "hidden_size" not in content
    saved = read_model_shape(write(tmp_path / "saved", content | {"architectures": PUBLISHED["architectures"]}))
    assert vars(saved) | {"vision": None} == vars(published) | {"vision": None}
    assert vars(saved.vision) | {"config": ""} == vars(vision) | {"config": ""}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"vision_config": PUBLISHED["vision_config"] | {"out_hidden_size": 3584}},
            "3584 channels, its decoder takes 2048",
        ),
        (
            {"vision_config": PUBLISHED["vision_config"] | {"hidden_act": "gelu"}},
            "hidden_act of its vision tower is gelu",
        ),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 8]}}, "48 frequencies, a head has 64"),
        ({"rope_scaling": {"type": "mrope"}}, "no 'mrope_section'"),
        ({"rope_scaling": {"rope_type": "dynamic", "mrope_section": [16, 24, 24]}}, "scaled by dynamic"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"image_token_id": None}, "cannot be understood"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(tmp_path, change, said):
    with pytest.raises(ConfigError, match=said):
        read_model_shape(write(tmp_path / "changed", PUBLISHED | change))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(1, 5)), max_size=4), st.integers(1, 4))
def test_positions_are_those_of_transformers(tiny_models, images, after):
    from transformers import AutoConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    class Model:
        config = AutoConfig.from_pretrained(tiny_models["qwen2_5_vl"])
        get_vision_position_ids = Qwen2_5_VLModel.get_vision_position_ids

    vision = read_model_shape(tiny_models["qwen2_5_vl"]).vision
    ids: list[int] = []
    for before, rows, columns in images:
        ids += [7] * before + [510] + [512] * (rows * columns) + [511]
    ids += [9] * after
    grids = [(1, 2 * rows, 2 * columns) for _, rows, columns in images]
    tokens = torch.tensor([ids])
    grid = torch.tensor(grids) if grids else None
    expected, _ = Qwen2_5_VLModel.get_rope_index(Model(), tokens, (tokens == 512).int(), image_grid_thw=grid)
    assert torch.equal(torch.tensor(positions(ids, grids, vision)), expected[:, 0])


@pytest.mark.parametrize("grids", [[], [(1, 4, 4), (1, 4, 4)], [(1, 4, 6)], [(1, 2, 2)]])
def test_image_tokens_that_are_not_those_of_the_grids_are_refused(tiny_models, grids):
    vision = read_model_shape(tiny_models["qwen2_5_vl"]).vision
    with pytest.raises(ValueError, match="not those of the images' grids"):
        positions([7, 510, 512, 512, 512, 512, 511, 9], grids, vision)


@pytest.fixture(params=["published", "inside model"])
def spelled(request, tiny_models, tmp_path):
    """A directory whose tensors are named as in published models, or as transformers has them in memory."""
    directory = Path(shutil.copytree(tiny_models["qwen2_5_vl"], tmp_path / "model"))
    if request.param == "inside model":
        tensors = load_file(directory / "model.safetensors")
        names = {name: name.replace("visual.", "model.visual.", 1) for name in tensors if name.startswith("visual.")}
        names |= {name: "model.language_model." + name[6:] for name in tensors if name.startswith("model.")}
        named = {names.get(name, name): tensor for name, tensor in tensors.items()}
        save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_weights_are_exported_as_they_came_in_whatever_their_names_begin_with(spelled, tmp_path):
    shape, alone = read_model_shape(spelled), TrainLayout(1, 1, 1)
    shard = megatron_shard(shape, alone, 0)
    params = {name: torch.full(size, torch.nan) for name, size in shard.params.items()}
    load_shard(spelled, shard, params, shape)
    export_hf(tmp_path / "exported", spelled, shape, [shard], params)
    to_megatron(spelled, tmp_path / "checkpoint", TrainLayout(2, 2, 1), verify=True)
    assert compare(spelled, tmp_path / "checkpoint") is None
    to_hf(tmp_path / "checkpoint", tmp_path / "converted", verify=True)
    given = load_file(spelled / "model.safetensors")
    for output in ("exported", "converted"):
        found = load_file(tmp_path / output / "model.safetensors")
        assert found.keys() == given.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in given.items())
    for file in spelled.iterdir():
        assert (tmp_path / "converted" / file.name).read_bytes() == file.read_bytes()
