from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.distributed.layout import RolloutLayout, TrainLayout
from spmd_rl.platforms.cpu import CPU
from spmd_rl.weights.families import megatron_shard, vllm_shard
from spmd_rl.weights.transfer.boxes import Box, Piece, Shard, common_boxes, split, whole
from spmd_rl.weights.transfer.checksum import TURNS, Checksums, verify
from tests.weights.models import filled, model_shape, models_and_layouts, random_weights


def piece_checksum(tensor, piece):
    """The checksum of a tensor that holds the piece and nothing else."""
    box = Box(piece.tensor, piece.start, piece.shape)
    shard = Shard({"": box.shape}, (Piece(*box, "", (0,) * len(box.shape)),))
    return shard_checksums(shard, {"": tensor}, [box])[box]


def shard_checksums(shard, params, boxes):
    """The checksum of each of the boxes that the shard holds."""
    checksums = Checksums(shard, boxes)
    checksums.update_all(params)
    return {boxes[number]: value for number, _, value in checksums.values()}


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(models_and_layouts(most_ranks=8), st.sampled_from((torch.float32, torch.bfloat16)))
def test_every_layout_gives_a_box_the_same_checksum(case, dtype):
    shape, sizes, rollout = case
    train = TrainLayout(*sizes)
    shards = [megatron_shard(shape, train, rank) for rank in range(train.world)]
    shards += [vllm_shard(shape, RolloutLayout(rollout, train.world), rank) for rank in range(train.world)]
    tensors = random_weights(shape, dtype)
    boxes = common_boxes(shards)
    known = {}
    for shard in shards:
        for box, value in shard_checksums(shard, filled(shard, tensors), boxes).items():
            assert known.setdefault(box, value) == value
    assert known.keys() == set(boxes)
    for box, value in known.items():
        index = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
        assert piece_checksum(tensors[box.tensor][index], box) == value


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 36))
def test_checksums_of_disjoint_boxes_add_up(rows, columns, limit):
    values = torch.randn(rows + 3, columns + 2)
    whole = Box("a", (3, 2), (rows, columns))
    total = sum(
        piece_checksum(values[r : r + h, c : c + w], part)
        for part in split(whole, limit)
        for (r, c), (h, w) in [(part.start, part.shape)]
    )
    assert (total - piece_checksum(values[3:, 2:], whole)) % 2**64 == 0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_changed_element_and_values_that_changed_places_are_noticed(data):
    rows, columns = data.draw(st.integers(2, 9)), data.draw(st.integers(2, 9))
    values = torch.randn(rows, columns)
    box = Box("a", (0, 0), (rows, columns))
    before = piece_checksum(values, box)
    r, c = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    nudged = values.clone()
    nudged[r, c] = torch.nextafter(nudged[r, c], torch.tensor(torch.inf))
    assert piece_checksum(nudged, box) != before
    for dim in (0, 1):
        a, b = (0, 1) if dim == 0 else (c - 1, c)
        order = list(range(values.shape[dim]))
        order[a], order[b] = order[b], order[a]
        assert piece_checksum(values.index_select(dim, torch.tensor(order)), box) != before
    assert piece_checksum(values, Box("a", (1, 0), box.shape)) != before
    assert piece_checksum(values, Box("a", (0, 1), box.shape)) != before


def test_bfloat16_values_in_float32_that_changed_places_are_noticed():
    values = torch.randn(64, 64).bfloat16().float()
    before = piece_checksum(values, Box("a", (0, 0), (64, 64)))
    for n in range(200):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(n))
        assert piece_checksum(values[:, order], Box("a", (0, 0), (64, 64))) != before


def test_an_expert_in_a_stack_has_the_checksum_it_has_alone():
    experts = torch.randn(3, 4, 5)
    shard = Shard({"w": (3, 4, 5)}, tuple(Piece(f"e{e}", (0, 0), (4, 5), "w", (e, 0, 0)) for e in range(3)))
    fused = Shard({"w": (3, 4, 5)}, (Piece("all", (0, 0, 0), (3, 4, 5), "w", (0, 0, 0)),))
    sums = shard_checksums(shard, {"w": experts}, common_boxes([shard]))
    assert [sums[Box(f"e{e}", (0, 0), (4, 5))] for e in range(3)] == [
        piece_checksum(experts[e], Box(f"e{e}", (0, 0), (4, 5))) for e in range(3)
    ]
    (total,) = shard_checksums(fused, {"w": experts}, common_boxes([fused])).values()
    parts = [piece_checksum(experts[:, r : r + 2], Box("all", (0, r, 0), (3, 2, 5))) for r in (0, 2)]
    assert (sum(parts) - total) % 2**64 == 0


def sides(change=None):
    shape, layout = model_shape(), TrainLayout(1, 1, 1)
    train, engine = megatron_shard(shape, layout, 0), vllm_shard(shape, RolloutLayout(1, 1), 0)
    boxes = common_boxes([train, engine])
    tensors = random_weights(shape)
    trained, held = filled(train, tensors), filled(engine, tensors)
    if change is not None:
        change(held)
    training, rollout = Checksums(train, boxes, "training"), Checksums(engine, boxes, "rollout")
    training.update_all(trained)
    rollout.update_all(held)
    return training, rollout, held


def test_equal_weights_pass_and_need_an_update_before_the_next_check():
    training, rollout, held = sides()
    verify([training, rollout])
    training.update_all(filled(megatron_shard(model_shape(), TrainLayout(1, 1, 1), 0), random_weights(model_shape())))
    rollout.update("model.norm.weight", held["model.norm.weight"])
    with pytest.raises(RuntimeError, match="rollout: no checksum of .* parameters, among them lm_head.weight"):
        verify([training, rollout])


def test_one_wrong_element_in_the_engine_is_named_by_tensor_slice_parameter_and_rank():
    def change(held):
        held["model.layers.1.self_attn.qkv_proj.weight"][21, 3] += 1  # the second group's k head

    with pytest.raises(RuntimeError) as error:
        verify(sides(change)[:2])
    text = str(error.value)
    assert "in 1 slices" in text and "model.layers.1.self_attn.k_proj.weight[4:8, 0:8]" in text
    assert "model.layers.1.self_attn.qkv_proj.weight of rollout on rank 0" in text
    assert "decoder.layers.1.self_attention.linear_qkv.weight of training on rank 0" in text


def test_a_parameter_of_another_shape_is_not_read():
    training, _, _ = sides()
    with pytest.raises(AssertionError, match=r"\(2, 2\) is not"):
        training.update("decoder.final_layernorm.weight", torch.zeros(2, 2))


def test_padding_takes_no_part():
    def change(held):
        held["lm_head.weight"][19:] = 7

    verify(sides(change)[:2])


def by_torch():
    """As on an accelerator, whose memory the compiled loop cannot read."""
    return patch("spmd_rl.weights.transfer.checksum.current", lambda: replace(CPU, row_sums=None))


def on_the_host():
    """As on an accelerator whose whole numbers may saturate."""
    record = replace(CPU, row_sums=None, wraps_integers=False)
    return patch("spmd_rl.weights.transfer.checksum.current", lambda: record)


WAYS = (nullcontext, by_torch, on_the_host)


def large():
    """A shard of one matrix that is checked in turns, and one vector and one small matrix that are not."""
    sizes = {"a": (70, 300), "norm": (300,), "b": (20, 8)}
    pieces = tuple(Piece(name, (0,) * len(size), size, name, (0,) * len(size)) for name, size in sizes.items())
    return Shard(sizes, pieces), {name: torch.randn(size) for name, size in sizes.items()}


def differs(shard, one, other, turn):
    sums = []
    for params in (one, other):
        checksums = Checksums(shard, common_boxes([shard]))
        checksums.forget(turn)
        checksums.update_all(params)
        sums.append([value for _, _, value in checksums.values()])
    return sums[0] != sums[1]


@pytest.mark.parametrize("way", WAYS)
def test_a_turn_sees_stale_tensors_at_once_and_all_turns_together_see_every_element(way):
    with way():
        stale_tensors_and_flipped_elements_are_seen()


def stale_tensors_and_flipped_elements_are_seen():
    shard, params = large()
    for name in params:
        stale = {**params, name: params[name] + 1e-3}
        assert all(differs(shard, params, stale, turn) for turn in range(TURNS))
    for name, element in (("a", (33, 7)), ("norm", (5,)), ("b", (3, 3))):
        flipped = {other: values.clone() for other, values in params.items()}
        flipped[name][element] += 1e-3
        seen = [differs(shard, params, flipped, turn) for turn in range(TURNS)]
        assert sum(seen) == (1 if name == "a" else TURNS)
        assert differs(shard, params, flipped, None)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_compiled_loop_and_torch_give_the_same_sums(data):
    """Of boxes that are cut in rows and columns, in a stack, beside padding, vectors; in turns and as a whole."""
    rows, columns = data.draw(st.integers(2, 150)), data.draw(st.integers(2, 300))
    r, c = data.draw(st.integers(1, rows - 1)), data.draw(st.integers(1, columns - 1))
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8)))
    turn = data.draw(st.none() | st.integers(0, 3 * TURNS))
    sizes = {"a": (rows + 3, columns), "stack": (2, rows, columns), "norm": (columns,), "long": (140 * columns,)}
    held = [Piece("a", (0, 0), (rows, columns), "a", (0, 0)), *(whole(n, sizes[n], n) for n in ("norm", "long"))]
    held += [Piece(f"e{e}", (0, 0), (rows, columns), "stack", (e, 0, 0)) for e in range(2)]
    shard = Shard(sizes, tuple(held))
    cuts = [
        Box(t, (a, b), (h, w)) for t in ("a", "e1") for a, h in ((0, r), (r, rows - r)) for b, w in parts(c, columns)
    ]
    boxes = common_boxes([shard, Shard({}, tuple(Piece(*box, "", (0, 0)) for box in cuts))])
    params = {}
    for name, size in sizes.items():
        count = torch.Size(size).numel() * dtype.itemsize
        noise = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(rows + columns))
        params[name] = noise.to(torch.uint8).view(dtype).view(size)
    params["a"] = params["a"].t().contiguous().t()  # where an engine keeps a matrix transposed
    found = [by(way, shard, boxes, params, turn) for way in WAYS]
    assert found[0] == found[1] == found[2]


def parts(at, end):
    return (0, at), (at, end - at)


def by(way, shard, boxes, params, turn):
    checksums = Checksums(shard, boxes)
    checksums.forget(turn)
    with way():
        checksums.update_all(params)
    return checksums.values()


@pytest.mark.parametrize("turn", [0, 5, 31])
def test_in_every_turn_all_layouts_read_the_same_rows(turn):
    shape = model_shape(hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, vocabulary=515, layers=2)
    shards = [megatron_shard(shape, TrainLayout(2, 2, 1), rank) for rank in range(4)]
    shards += [vllm_shard(shape, RolloutLayout(4, 4), rank) for rank in range(4)]
    tensors = random_weights(shape)
    boxes, known = common_boxes(shards), {}
    for shard in shards:
        checksums = Checksums(shard, boxes)
        checksums.forget(turn)
        checksums.update_all(filled(shard, tensors))
        for number, _, value in checksums.values():
            assert known.setdefault(number, value) == value
    assert len(known) == len(boxes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tensor", [1, 2])
def test_all_turns_together_are_the_complete_checksum(tensor, dtype):
    shape = model_shape(hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=512, vocabulary=515, layers=1)
    tensors = random_weights(shape, dtype)
    for shard in (megatron_shard(shape, TrainLayout(tensor, 1, 1), 0), vllm_shard(shape, RolloutLayout(tensor, 2), 0)):
        boxes, params = common_boxes([shard]), filled(shard, tensors)
        checksums = Checksums(shard, boxes)
        found = []
        for turn in (None, *range(TURNS)):
            checksums.forget(turn)
            checksums.update_all(params)
            found.append([value for _, _, value in checksums.values()])
        # A box is read as a whole in every turn, or each of its rows in one of them.
        complete = [value for value, *turns in zip(*found, strict=True) if all(turn == value for turn in turns)]
        in_turns = [(value, sum(turns)) for value, *turns in zip(*found, strict=True) if value not in complete]
        assert complete and in_turns
        assert all((value - total) % 2**64 == 0 for value, total in in_turns)
