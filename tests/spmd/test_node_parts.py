"""Checkpoints of nodes that share no disk: each keeps its own files, and a run that resumes brings them together."""

import pytest

from spmd.ranks import run_ranks

SECOND = "step_000002/training/__1_0.distcp"


@pytest.fixture(scope="module")
def told(tiny_models, tmp_path_factory):
    """Return of each node what it says of a run that saves twice, resumes, and then loses files of one node."""
    model = str(tiny_models["qwen2-tied"])
    steps = [
        ["save", 1],
        ["save", 2],
        ["files"],
        ["resume"],
        ["harm", 1, SECOND],
        ["resume"],
        ["harm", 1, SECOND],  # as it was
        ["resume", "runs/mine/checkpoints/step_000002"],
        ["lose", 1, SECOND],
        ["resume"],
        ["resume", "runs/mine/checkpoints/step_000002"],
    ]
    asked = {"model": model, "disks": str(tmp_path_factory.mktemp("disks")), "steps": steps}
    return [each["said"] for each in run_ranks("spmd.node_parts_ranks", 2, asked)]


def test_each_node_keeps_its_own_ranks_files_and_removes_older_ones_like_rank_0(told):
    first, second = (said[0] for said in told)
    both = {"step_000002/state.json", "step_000002/files.json", "latest"}
    assert set(first) & set(second) == both
    assert {"step_000002/random_00000.json", "step_000002/training/.metadata"} <= set(first)
    assert "step_000002/random_00001.json" in second and SECOND in second
    assert not any("step_000001" in name for name in first + second)


def test_a_resumed_run_brings_the_parts_together_and_leaves_each_node_what_it_had(told):
    for said in told:
        assert said[1] == [2, True, []]
        assert said[3] == [2, True, []]


def test_a_part_that_is_lost_or_harmed_is_named_with_its_node(told):
    for said in told:
        step, _, notes = said[2]
        assert step == 0 and any("on node 1: other bytes than were written" in note for note in notes)
        step, _, notes = said[4]
        assert step == 0
        lost = f"runs/mine/checkpoints/step_000002: node 1 lacks {SECOND.partition('/')[2]}"
        assert any(lost in note for note in notes), notes
        assert lost in said[5][0] and said[5][0].startswith("checkpoint.resume = runs/mine/checkpoints/step_000002: ")
