import pytest
import torch

from spmd.ranks import run_ranks
from spmd_rl.distributed.layout import RolloutLayout, TrainLayout
from spmd_rl.weights.families import megatron_shard, vllm_shard
from spmd_rl.weights.transfer.transfer_schedule import Schedule
from spmd_rl.weights.transfer.weight_transfer import Traffic, WeightTransfer
from tests.weights import ranks
from tests.weights.models import filled, model_shape, random_weights


@pytest.mark.spmd
def test_two_gloo_ranks_refresh_engines_in_every_layout_prove_it_and_export(tmp_path):
    texts = [said["wrong"] for said in run_ranks("tests.weights.ranks", ranks.WORLD, {"directory": str(tmp_path)})]
    assert texts[0] == texts[1]
    assert "model.layers.0.mlp.down_proj.weight of rollout on rank 1" in texts[0]


def one_rank():
    shape = model_shape()
    source, destination = megatron_shard(shape, TrainLayout(1, 1, 1), 0), vllm_shard(shape, RolloutLayout(1, 1), 0)
    tensors = random_weights(shape)
    return source, destination, filled(source, tensors), filled(destination, tensors)


def test_one_rank_alone_needs_no_process_group():
    source, destination, read, expected = one_rank()
    held = {name: torch.zeros(size) for name, size in destination.params.items()}
    traffic = WeightTransfer(Schedule([source], [destination]).plan(0), source).run(read, held)
    assert traffic == Traffic(0, 4 * sum(piece.elements for piece in destination.pieces))
    assert all(torch.equal(held[name], expected[name]) for name in expected)


def test_a_parameter_that_is_the_same_on_both_sides_is_lent_and_not_copied():
    source, destination, read, _ = one_rank()
    given = {}
    WeightTransfer(Schedule([source], [destination]).plan(0), source).run(
        read, lambda name, tensor: given.update({name: tensor})
    )
    assert given["model.norm.weight"].data_ptr() == read["decoder.final_layernorm.weight"].data_ptr()
    assert given["model.embed_tokens.weight"].shape == (64, 8) and not given["model.embed_tokens.weight"][19:].any()


def test_different_dtypes_on_the_two_sides_are_an_error_that_names_the_tensor():
    source, destination, read, _ = one_rank()
    held = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in destination.params.items()}
    with pytest.raises(
        AssertionError, match=r"model\.embed_tokens\.weight is torch\.float32 in one shard and torch\.bfloat16"
    ):
        WeightTransfer(Schedule([source], [destination]).plan(0), source).run(read, held)
