import pytest
import torch
from hypothesis import given, settings

from spmd_rl.distributed.layout import RolloutLayout, TrainLayout
from spmd_rl.models import FAMILIES
from spmd_rl.weights.families import hf_tensors, megatron_shard, vllm_shard
from tests.weights.models import filled, megatron_by_hand, model_shape, models_and_layouts, numbered, vllm_by_hand


@settings(max_examples=40, deadline=None)
@given(models_and_layouts())
def test_megatron_shards_are_what_cat_and_chunk_of_whole_tensors_give(case):
    shape, (tensor, _, data), _ = case
    layout = TrainLayout(tensor, 1, data)
    tensors = numbered(shape)
    for rank in range(layout.world):
        params = filled(megatron_shard(shape, layout, rank), tensors)
        for name, expected in megatron_by_hand(shape, tensors, tensor, rank % tensor).items():
            torch.testing.assert_close(params[name], expected, rtol=0, atol=0)


@settings(max_examples=40, deadline=None)
@given(models_and_layouts())
def test_vllm_shards_are_what_its_weight_loaders_cut(case):
    shape, _, tensor = case
    tensors = numbered(shape)
    layout = RolloutLayout(tensor, 2 * tensor)
    for rank in range(layout.world):
        params = filled(vllm_shard(shape, layout, rank), tensors)
        for name, expected in vllm_by_hand(shape, tensors, tensor, rank % tensor).items():
            torch.testing.assert_close(params[name], expected, rtol=0, atol=0)


@settings(max_examples=40, deadline=None)
@given(models_and_layouts())
def test_pieces_of_a_shard_do_not_overlap_and_the_stages_together_hold_the_model(case):
    shape, (tensor, pipeline, data), rollout = case
    layout = TrainLayout(tensor, pipeline, data)
    tensors = numbered(shape)
    seen = {name: torch.zeros_like(values) for name, values in tensors.items()}
    for rank in range(0, layout.world):
        shard = megatron_shard(shape, layout, rank)
        for piece in shard.pieces:
            seen[piece.tensor][tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))] = 1
    assert all(bool(values.all()) for values in seen.values())
    for shard in [megatron_shard(shape, layout, 0), vllm_shard(shape, RolloutLayout(rollout, rollout), 0)]:
        covered = {name: torch.zeros(size) for name, size in shard.params.items()}
        for piece in shard.pieces:
            covered[piece.param][tuple(slice(a, a + n) for a, n in zip(piece.at, piece.extent, strict=True))] += 1
        assert all(bool((values <= 1).all()) for values in covered.values())


@pytest.mark.parametrize("pipeline", [1, 2])
def test_the_last_stage_of_a_tied_model_has_its_own_copy_of_the_embedding_and_a_single_stage_none(pipeline):
    shape = model_shape(tied=True)
    last = megatron_shard(shape, TrainLayout(1, pipeline, 1), pipeline - 1)
    heads = [piece.tensor for piece in last.pieces if piece.param == "output_layer.weight"]
    assert heads == ["model.embed_tokens.weight"] * (pipeline > 1)
    assert "lm_head.weight" not in hf_tensors(shape)
    assert "lm_head.weight" not in vllm_shard(shape, RolloutLayout(1, 1), 0).params


def test_layers_are_counted_from_the_first_of_the_stage():
    shard = megatron_shard(model_shape(layers=4), TrainLayout(1, 2, 1), 1)
    norms = {piece.param: piece.tensor for piece in shard.pieces if "input_layernorm" in piece.param}
    assert norms == {
        f"decoder.layers.{j}.input_layernorm.weight": f"model.layers.{j + 2}.input_layernorm.weight" for j in (0, 1)
    }


def test_data_parallel_ranks_and_replicas_share_one_shard_object():
    shape, layout = model_shape(), TrainLayout(2, 1, 2)
    assert megatron_shard(shape, layout, 1) is megatron_shard(shape, layout, 3)
    assert vllm_shard(shape, RolloutLayout(2, 4), 0) is vllm_shard(shape, RolloutLayout(2, 4), 2)


def test_sizes_that_do_not_divide_the_model_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"4 attention heads don't divide by 3"):
        megatron_shard(model_shape(ffn=12, vocabulary=21), TrainLayout(3, 1, 1), 0)
    with pytest.raises(ValueError, match=r"parallel\.pipeline = 3: the model's 2 layers"):
        megatron_shard(model_shape(), TrainLayout(1, 3, 1), 0)
    with pytest.raises(ValueError, match=r"'gpt2'.*" + ", ".join(FAMILIES)):
        hf_tensors(model_shape(family="gpt2"))
