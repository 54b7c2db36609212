import json
import struct

import pytest
import torch

from spmd_rl.distributed.layout import TrainLayout
from spmd_rl.models.blocks import Experts, LatentAttention
from spmd_rl.weights.families import megatron_shard
from spmd_rl.weights.files.hf_extras import copy_companions
from spmd_rl.weights.files.hf_reader import check_headers, load_shard, read_headers
from tests.weights.models import filled, model_shape, random_weights, save_directory

LAYOUT = TrainLayout(2, 1, 1)


def empty(shard, dtype=torch.float32):
    """Parameters full of what must not survive loading."""
    return {name: torch.full(size, torch.nan, dtype=dtype) for name, size in shard.params.items()}


def load(path, shape, rank=0):
    shard = megatron_shard(shape, LAYOUT, rank)
    params = empty(shard)
    load_shard(path, shard, params, shape)
    return params


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_holds_its_slices_of_the_files_and_zeros_below_the_vocabulary(tmp_path, files, stored, rank):
    shape = model_shape(qkv_bias=True)
    tensors = random_weights(shape, stored)
    save_directory(tmp_path, tensors, files)
    shard = megatron_shard(shape, LAYOUT, rank)
    params = empty(shard)
    load_shard(tmp_path, shard, params, shape)
    expected = filled(shard, {name: values.float() for name, values in tensors.items()})
    assert all(torch.equal(params[name], expected[name]) for name in shard.params)


def test_values_are_cast_to_the_dtype_of_the_parameter(tmp_path):
    shape = model_shape()
    tensors = random_weights(shape)
    shard = megatron_shard(shape, LAYOUT, 0)
    params = empty(shard, torch.bfloat16)
    load_shard(save_directory(tmp_path, tensors), shard, params, shape)
    expected = filled(shard, {name: values.bfloat16() for name, values in tensors.items()})
    assert all(torch.equal(params[name], expected[name]) for name in shard.params)


def test_rotary_tables_and_the_head_of_a_tied_model_are_ignored(tmp_path):
    shape = model_shape(tied=True)
    tensors = random_weights(shape)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    load(save_directory(tmp_path, tensors), shape)


def test_the_layer_for_guessing_ahead_that_deepseek_is_published_with_is_ignored(tmp_path):
    shape = model_shape(
        family="deepseek_v3",
        qk_norm=False,
        layers=2,
        experts=Experts(4, 2, 6, 6, False, (False, True), "sigmoid", True, True, 1, 1, 2.5),
        mla=LatentAttention(q_rank=5, kv_rank=6, nope_dim=2, rope_dim=2, v_dim=2),
    )
    tensors = random_weights(shape)
    further = {f"model.layers.2.{name}": torch.ones(3) for name in ("enorm.weight", "embed_tokens.weight")}
    load(save_directory(tmp_path / "whole", tensors | further), shape)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.enorm\.weight, which a deepseek_v3 model"):
        load(save_directory(tmp_path / "odd", tensors | {"model.layers.1.enorm.weight": torch.ones(3)}), shape)


def test_other_tensors_are_refused_by_name(tmp_path):
    shape = model_shape()
    tensors = random_weights(shape) | {"model.layers.0.self_attn.q_proj.bias": torch.ones(16)}
    with pytest.raises(ValueError, match=r"holds model\.layers\.0\.self_attn\.q_proj\.bias, which a qwen3 model"):
        load(save_directory(tmp_path, tensors), shape)


def test_a_model_that_should_score_and_has_no_head_is_said_to_have_none(tmp_path):
    shape = model_shape(head="value", labels=1)
    tensors = random_weights(shape)
    assert tensors.pop("score.weight").shape == (1, shape.hidden)
    save_directory(tmp_path, tensors)
    with pytest.raises(ValueError, match=r"lacks score\.weight, its score head"):
        check_headers(tmp_path, read_headers(tmp_path), shape)


def test_a_missing_tensor_is_named_before_anything_is_copied(tmp_path):
    shape = model_shape()
    tensors = random_weights(shape)
    del tensors["model.norm.weight"]
    save_directory(tmp_path, tensors)
    shard = megatron_shard(shape, LAYOUT, 0)
    params = empty(shard)
    with pytest.raises(ValueError, match=r"lacks model\.norm\.weight"):
        load_shard(tmp_path, shard, params, shape)
    assert all(bool(values.isnan().all()) for values in params.values())


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path):
    shape = model_shape()
    tensors = random_weights(shape)
    with pytest.raises(
        ValueError, match=r"model\.embed_tokens\.weight has shape \(19, 8\) in model\.safetensors.*\(20, 8\)"
    ):
        load(save_directory(tmp_path, tensors), model_shape(vocabulary=20))


def test_quantized_weights_are_refused(tmp_path):
    shape = model_shape()
    tensors = random_weights(shape)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is I8"):
        load(save_directory(tmp_path, tensors), shape)


def in_float8(tensors, block):
    """Every matrix but the embedding and the head as blocks of float8 with their scales; and what that means."""
    stored, meant = {}, {}
    for name, values in tensors.items():
        if values.dim() != 2 or "embed" in name or "lm_head" in name:
            stored[name] = meant[name] = values
            continue
        sizes = [-(-size // part) for size, part in zip(values.shape, block, strict=True)]
        scales = torch.rand(sizes) + 0.5
        stored[name], stored[name + "_scale_inv"] = values.to(torch.float8_e4m3fn), scales
        wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
        wide = wide[: values.shape[0], : values.shape[1]]
        meant[name] = (stored[name].float() * wide).bfloat16().float()
    return stored, meant


def save_float8(path, shape, block, leave_out=()):
    stored, meant = in_float8(random_weights(shape), block)
    save_directory(path, {name: values for name, values in stored.items() if name not in leave_out}, 2)
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
    (path / "config.json").write_text(json.dumps(config))
    return meant


@pytest.mark.parametrize("block", [(4, 4), (3, 5), (128, 128)])
@pytest.mark.parametrize("rank", [0, 1])
def test_blocks_of_float8_are_multiplied_by_their_scales_wherever_a_rank_cuts_them(tmp_path, block, rank):
    shape = model_shape()
    meant = save_float8(tmp_path, shape, block)
    shard = megatron_shard(shape, LAYOUT, rank)
    params = empty(shard)
    load_shard(tmp_path, shard, params, shape)
    expected = filled(shard, meant)
    assert all(torch.equal(params[name], expected[name]) for name in shard.params)


def test_float8_without_its_scales_is_refused(tmp_path):
    shape = model_shape()
    lost = next(name for name in in_float8(random_weights(shape), (4, 4))[0] if name.endswith("_scale_inv"))
    save_float8(tmp_path, shape, (4, 4), (lost,))
    with pytest.raises(ValueError, match=rf"{lost.removesuffix('_scale_inv')} is F8_E4M3.*scales .* are not there"):
        load(tmp_path, shape)


def test_what_is_written_of_such_a_directory_speaks_of_neither_float8_nor_layers_that_are_left_out(tmp_path):
    config = {"quantization_config": {"quant_method": "fp8"}, "num_nextn_predict_layers": 1, "torch_dtype": "float32"}
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    (tmp_path / "from" / "config.json").write_text(json.dumps(config))
    copy_companions(tmp_path / "from", tmp_path / "to", torch.bfloat16)
    written = json.loads((tmp_path / "to" / "config.json").read_text())
    assert written == {"num_nextn_predict_layers": 0, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize("damage", ["cut", "header", "empty", "pointer", "length"])
@pytest.mark.parametrize("files", [1, 2])
def test_a_broken_file_is_named(tmp_path, damage, files):
    shape = model_shape()
    save_directory(tmp_path, random_weights(shape), files)
    file = sorted(tmp_path.glob("*.safetensors"))[-1]
    data = file.read_bytes()
    file.write_bytes(
        {
            "cut": data[:-100],
            "header": data[:8] + b"?" * 20 + data[28:],
            "empty": b"",
            "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "length": struct.pack("<Q", 1 << 60) + data[8:],
        }[damage]
    )
    with pytest.raises(ValueError, match=rf"{file.name}: broken or cut off"):
        load(tmp_path, shape)


def test_a_directory_that_is_missing_or_has_no_safetensors_is_named(tmp_path):
    shape = model_shape()
    with pytest.raises(ValueError, match=r"model\.path = .*nowhere: no such directory"):
        load(tmp_path / "nowhere", shape)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"no model\.safetensors and no .*index\.json \(only pytorch_model\.bin\)"):
        load(tmp_path, shape)


def test_an_index_must_be_json_and_name_files_and_tensors_that_are_there(tmp_path):
    shape = model_shape()
    save_directory(tmp_path, random_weights(shape), files=2)
    index = tmp_path / "model.safetensors.index.json"
    names = json.loads(index.read_text())
    names["weight_map"]["extra"] = "model-00002-of-00002.safetensors"
    index.write_text(json.dumps(names))
    with pytest.raises(ValueError, match=r"lists extra, which no file holds"):
        load(tmp_path, shape)
    names["weight_map"]["extra"] = "gone.safetensors"
    index.write_text(json.dumps(names))
    with pytest.raises(ValueError, match=r"names gone\.safetensors, not there"):
        load(tmp_path, shape)
    for text in ("{", "[]", '{"weight_map": 1}'):
        index.write_text(text)
        with pytest.raises(ValueError, match="not an index of safetensors files"):
            load(tmp_path, shape)
