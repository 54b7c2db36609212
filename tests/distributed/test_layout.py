import pytest

from spmd_rl.config.config import ParallelConfig
from spmd_rl.distributed.layout import RolloutLayout, TrainLayout


def test_ranks_run_over_tensor_then_data_then_pipeline():
    layout = TrainLayout(tensor=2, pipeline=2, data=3)
    assert [layout.rank(*at) for at in ((1, 0, 0), (0, 1, 0), (0, 0, 1))] == [1, 2, 6]
    for rank in range(layout.world):
        at = layout.coords(rank)
        assert layout.rank(at.tensor, at.data, at.pipeline) == rank
    assert layout.tensor_ranks(5) == (4, 5)
    assert layout.pipeline_ranks(4) == (4, 10)


def test_context_ranks_are_next_to_each_other_and_see_the_same_samples():
    layout = TrainLayout.of(ParallelConfig(tensor=2, context=2, pipeline=2, expert=8), 16)
    assert (layout.data, layout.world) == (2, 16)
    assert [(layout.coords(rank).context, layout.coords(rank).data) for rank in range(0, 8, 2)] == [
        *((0, 0), (1, 0), (0, 1), (1, 1))
    ]
    assert [layout.coords(rank).expert for rank in range(8)] == list(range(8))
    for rank in range(layout.world):
        at = layout.coords(rank)
        assert layout.rank(at.tensor, at.data, at.pipeline, at.context) == rank


def test_a_layout_takes_a_model_of_another_depth():
    layout = TrainLayout(tensor=1, pipeline=3, data=1, layers_per_stage=(2, 3, 3))
    assert layout.suited_to(8) is layout
    assert layout.suited_to(6).chunk_layers(6) == (range(2), range(2, 4), range(4, 6))
    assert layout.suited_to(7).chunk_layers(7) == (range(2), range(2, 4), range(4, 7))


def test_a_replica_is_consecutive_ranks():
    layout = RolloutLayout(tensor=2, world=6)
    assert (layout.replicas, layout.replica(5), layout.tensor_rank(5), layout.ranks(2)) == (3, 2, 1, (4, 5))


def test_a_rollout_size_that_does_not_divide_the_world_is_refused_by_name():
    with pytest.raises(ValueError, match=r"rollout\.tensor = 4.*6 ranks"):
        RolloutLayout(tensor=4, world=6)
