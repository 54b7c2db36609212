import json
import os

import pytest
import torch
from safetensors.torch import load_file

from spmd_rl.distributed.layout import TrainLayout
from spmd_rl.weights.families import megatron_shard
from spmd_rl.weights.files.export import ExportSettings, export_hf
from spmd_rl.weights.files.hf_reader import load_shard
from tests.weights.models import filled, model_shape, random_weights, save_directory

LAYOUT = TrainLayout(1, 1, 1)


def read_all(path):
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def same_bits(a, b):
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most", [5_000_000_000, 2000])
@pytest.mark.parametrize("tied", [False, True])
def test_what_was_loaded_is_exported_bit_for_bit(tmp_path, dtype, most, tied):
    shape = model_shape(qkv_bias=True, tied=tied)
    tensors = random_weights(shape, dtype)
    source = save_directory(tmp_path / "source", tensors, torch_dtype=str(dtype).removeprefix("torch."))
    shard = megatron_shard(shape, LAYOUT, 0)
    params = {name: torch.empty(size, dtype=dtype) for name, size in shard.params.items()}
    load_shard(source, shard, params, shape)
    target = tmp_path / "run" / "hf"
    export_hf(target, source, shape, [shard], params, settings=ExportSettings(file_bytes=most, bucket_elements=64))
    assert same_bits(read_all(target), tensors)
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (target / name).read_bytes() == (source / name).read_bytes()
    files = sorted(file.name for file in target.glob("model*"))
    if most > 2000:
        assert files == ["model.safetensors"]
    else:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == files[:-1] and len(files) > 2
        assert index["metadata"]["total_size"] == sum(values.nbytes for values in tensors.values())
        assert all(
            sum(values.nbytes for values in load_file(target / name).values()) <= most
            or len(load_file(target / name)) == 1
            for name in files[:-1]
        )
        again = {name: torch.empty(size, dtype=dtype) for name, size in shard.params.items()}
        load_shard(target, shard, again, shape)
        assert same_bits(again, params)
    assert os.listdir(target.parent) == ["hf"]


def test_an_export_replaces_an_older_one_and_the_remains_of_one_that_was_cut_off(tmp_path):
    shape = model_shape()
    source = save_directory(tmp_path / "source", random_weights(shape))
    shard = megatron_shard(shape, LAYOUT, 0)
    save_directory(tmp_path / "out" / "hf", random_weights(shape, seed=1), files=2)
    save_directory(tmp_path / "out" / "hf.partial", random_weights(shape, seed=2))
    new = random_weights(shape, seed=3)
    export_hf(tmp_path / "out" / "hf", source, shape, [shard], filled(shard, new))
    assert same_bits(read_all(tmp_path / "out" / "hf"), new)
    assert os.listdir(tmp_path / "out") == ["hf"]


def test_another_dtype_is_written_into_the_config_too(tmp_path):
    shape = model_shape()
    source = save_directory(tmp_path / "source", random_weights(shape), dtype="float32", rope_theta=1e6)
    shard = megatron_shard(shape, LAYOUT, 0)
    params = filled(shard, random_weights(shape))
    export_hf(tmp_path / "hf", source, shape, [shard], params, settings=ExportSettings(torch.bfloat16))
    expected = {name: values.bfloat16() for name, values in random_weights(shape).items()}
    assert same_bits(read_all(tmp_path / "hf"), expected)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config == {"model_type": "tiny", "dtype": "bfloat16", "rope_theta": 1e6}


def test_a_head_that_the_source_of_a_tied_model_stores_is_stored_again(tmp_path):
    shape = model_shape(tied=True)
    tensors = random_weights(shape)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    source = save_directory(tmp_path / "source", tensors)
    shard = megatron_shard(shape, LAYOUT, 0)
    export_hf(tmp_path / "hf", source, shape, [shard], filled(shard, tensors))
    assert same_bits(read_all(tmp_path / "hf"), tensors)


def test_tensors_of_two_dtypes_keep_them(tmp_path):
    shape = model_shape()
    tensors = random_weights(shape, torch.bfloat16)
    for name in tensors:
        if "norm" in name:
            tensors[name] = tensors[name].float()
    source = save_directory(tmp_path / "source", tensors)
    shard = megatron_shard(shape, LAYOUT, 0)
    dtype = {piece.param: tensors[piece.tensor].dtype for piece in shard.pieces}
    params = {name: torch.empty(size, dtype=dtype[name]) for name, size in shard.params.items()}
    load_shard(source, shard, params, shape)
    export_hf(tmp_path / "hf", source, shape, [shard], params)
    assert same_bits(read_all(tmp_path / "hf"), tensors)


def test_the_source_and_directories_of_something_else_are_not_written_to(tmp_path):
    shape = model_shape()
    source = save_directory(tmp_path / "source", random_weights(shape))
    shard = megatron_shard(shape, LAYOUT, 0)
    params = filled(shard, random_weights(shape))
    with pytest.raises(ValueError, match=r"that is model\.path itself"):
        export_hf(source, source, shape, [shard], params)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("...")
    with pytest.raises(ValueError, match="is no model directory"):
        export_hf(tmp_path / "thesis", source, shape, [shard], params)
    assert os.listdir(tmp_path / "thesis") == ["chapter1.tex"]
