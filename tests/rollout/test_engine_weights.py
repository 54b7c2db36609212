"""Laws of writing through: a parameter takes memory from the moment it is looked up until it is packed."""

import sys
from types import SimpleNamespace

import pytest
import torch

from spmd_rl.patches.vllm_packing import PackedExperts, PackedLinear
from spmd_rl.rollout.engine_weights import SleepMode, Weights, plain_tensors
from spmd_rl.rollout.packed_weights import PackedWeights


class Linear(PackedLinear):
    """Packs by copying."""

    def pack(self, name, weight):
        self._packed = weight.clone()
        return True


class Experts(PackedExperts):
    """Packs by copying."""

    def pack(self, name, weight):
        self._packed[name] = weight.clone()
        return True


def layer(packed=None, attribute="cpu_linear", **parameters):
    module = torch.nn.Module()
    for name, value in parameters.items():
        module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    if packed is not None:
        setattr(module, attribute, packed)
    return module


@pytest.fixture
def model():
    """An embedding that is the output layer too, a norm, a linear layer with a bias, and experts."""
    model = torch.nn.Module()
    model.embedding = layer(weight=torch.ones(4, 2))
    model.norm = layer(weight=torch.ones(2))
    model.linear = layer(Linear(), weight=torch.ones(2, 3), bias=torch.ones(2))
    model.experts = layer(
        Experts("vec", 8, 8), "cpu_experts", w13_weight=torch.ones(2, 16, 2), w2_weight=torch.ones(2, 2, 8)
    )
    model.head = layer(Linear())
    model.head.weight = model.embedding.weight
    return model


def memory(weights):
    return {name for name in weights if weights.plain(name).untyped_storage().nbytes()}


def write(weights, value):
    most = 0
    for name in weights:
        weights[name].fill_(value)
        most = max(most, len(memory(weights)))
        weights.written(name)
    weights.end()
    return most


def test_after_a_refresh_only_what_is_read_as_it_is_has_plain_memory(model):
    weights = PackedWeights(model, torch.float32)
    weights.release()
    assert memory(weights) == set()
    for value in (2.0, 3.0):
        weights.begin()
        write(weights, value)
        assert memory(weights) == {"embedding.weight", "norm.weight", "linear.bias"}
        packed = (
            model.linear.cpu_linear._packed,
            model.head.cpu_linear._packed,
            model.experts.cpu_experts.packed("w2_weight"),
        )
        assert all((p == value).all() for p in packed) and (model.embedding.weight == value).all()
        weights.release()
        assert memory(weights) == set() and model.linear.cpu_linear._packed is None


def test_one_parameter_at_a_time_has_room_beside_those(model):
    weights = PackedWeights(model, torch.float32)
    weights.release()
    assert write(weights, 1.0) <= len({"embedding.weight", "norm.weight", "linear.bias"}) + 1


def test_a_parameter_that_is_complete_is_not_looked_up_again(model):
    weights = PackedWeights(model, torch.float32)
    weights.written("linear.weight")
    with pytest.raises(AssertionError, match=r"linear\.weight"):
        weights["linear.weight"]


def test_an_incomplete_refresh_names_what_is_missing(model):
    weights = PackedWeights(model, torch.float32)
    for name in set(weights) - {"experts.w2_weight"}:
        weights.written(name)
    with pytest.raises(AssertionError, match=r"1 parameters .*experts\.w2_weight"):
        weights.end()


def test_lent_values_are_read_where_they_lie_until_they_go_back(model):
    weights = PackedWeights(model, torch.float32)
    weights.release()
    lent = {name: torch.full_like(parameter, 7.0) for name, parameter in model.named_parameters()}
    for value in (7.0, 8.0):
        weights.begin()
        for name, values in lent.items():
            values.fill_(value)
            assert weights.lend(name, values)
            weights.written(name)
        weights.end()
        assert model.head.weight.data_ptr() == lent["embedding.weight"].data_ptr()
        assert (model.norm.weight == value).all() and (model.linear.cpu_linear._packed == value).all()
        assert model.linear.weight.untyped_storage().nbytes() == 0
        weights.release()
        assert memory(weights) == set()
        assert all((values == value).all() for values in lent.values())
    # The next refresh may have nothing to lend.
    weights.begin()
    write(weights, 9.0)
    assert (model.embedding.weight == 9.0).all() and (lent["embedding.weight"] == 8.0).all()


def test_what_latent_attention_derives_from_lent_values_is_theirs(model):
    class Attention(torch.nn.Module):
        def __init__(self, source):
            super().__init__()
            self.kv_b_proj, self.W_UK_T = source, torch.nn.Parameter(torch.ones(2, 3), requires_grad=False)

        def process_weights_after_loading(self, dtype):
            self.W_UK_T.data.copy_(self.kv_b_proj.weight * 2)

    model.attention = Attention(model.linear)
    weights = PackedWeights(model, torch.float32)
    weights.release()
    weights.begin()
    assert weights.lend("linear.weight", torch.full((2, 3), 5.0))
    weights.written("linear.weight")
    assert (model.attention.W_UK_T == 10.0).all() and (model.linear.cpu_linear._packed == 5.0).all()


def test_where_vllm_sleeps_itself_nothing_is_packed_or_released(model):
    weights = Weights(model, torch.float32)
    write(weights, 5.0)
    assert memory(weights) == set(weights) and model.linear.cpu_linear._packed is None
    assert (weights["linear.weight"] == 5.0).all()


def test_padded_experts_keep_gate_and_up_in_halves(monkeypatch):
    import vllm._custom_ops as ops

    monkeypatch.setattr(ops, "cpu_prepack_moe_weight", lambda weight, isa: weight)
    experts = PackedExperts("vec", ffn=3, padded_ffn=4)
    w13, w2 = torch.arange(2 * 6 * 2.0).reshape(2, 6, 2), torch.arange(2 * 2 * 3.0).reshape(2, 2, 3)
    experts.pack("w13_weight", w13)
    experts.pack("w2_weight", w2)
    packed13, packed2 = experts.packed("w13_weight"), experts.packed("w2_weight")
    assert torch.equal(packed13[:, :3], w13[:, :3]) and torch.equal(packed13[:, 4:7], w13[:, 3:])
    assert torch.equal(packed2[:, :, :3], w2)
    assert not packed13[:, [3, 7]].any() and not packed2[:, :, 3].any()


def test_a_weight_without_kernels_on_this_cpu_is_multiplied_by_torch(monkeypatch):
    ops = pytest.importorskip("vllm._custom_ops")

    def refuse(weight, shapes):
        raise RuntimeError("could not create a primitive descriptor")

    monkeypatch.setattr(ops, "_supports_onednn", True)
    monkeypatch.setattr(ops, "create_onednn_mm", refuse)
    linear, weight = PackedLinear(), torch.eye(3, dtype=torch.bfloat16)
    assert not linear.pack("weight", weight)
    assert torch.equal(linear(weight, weight, None), weight)


class Sleeper:
    """An engine whose sleep loses what is no buffer, and whose wake-up puts transposed views in place of experts."""

    def __init__(self, model, transposes):
        self.model, self.transposes = model, transposes

    def sleep(self, level):
        kept = {id(buffer) for buffer in self.model.buffers()}
        for tensor in (*self.model.parameters(), self.model.experts.map, *self.model.dispatcher.splits.values()):
            assert id(tensor) not in kept
            tensor.data.zero_()

    def wake_up(self, tags):
        if self.transposes and tags == ["weights"]:
            for name in ("w13_weight", "w2_weight"):
                now = getattr(self.model.experts, name)
                setattr(self.model.experts, name, torch.nn.Parameter(now.data.transpose(1, 2), requires_grad=False))


class Dispatcher:
    """Sends tokens to experts; a library's own object in the model."""

    def __init__(self):
        self.splits = {"experts": torch.tensor([3, 1])}


Dispatcher.__module__ = "vllm_ascend.ops"


@pytest.mark.parametrize("transposes", [True, False])
def test_experts_are_written_where_they_are_and_what_sleep_loses_comes_back(model, transposes):
    # [experts, out, in] in a checkpoint and a refresh; vllm-ascend up to 0.25 computes with [experts, in, out].
    shapes = {"experts.w13_weight": (2, 16, 2), "experts.w2_weight": (2, 2, 8)}
    if transposes:
        for name, (e, rows, columns) in shapes.items():
            weight = torch.nn.Parameter(torch.ones(e, columns, rows), requires_grad=False)
            setattr(model.experts, name.split(".")[1], weight)
    model.experts.map, model.dispatcher = torch.tensor([1, 0]), Dispatcher()
    model.experts.register_buffer("kept", torch.ones(3))
    model.norm.kv_cache = [torch.ones(5)]
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    runner = SimpleNamespace(get_model=lambda: model, model_config=SimpleNamespace(dtype=torch.float32))
    memory = SleepMode(Sleeper(model, transposes), runner)
    for value in (5.0, 6.0):
        memory.sleep()
        memory.wake_weights()
        weights = memory.weights
        weights.begin()
        for name in weights:
            if name in shapes:
                assert weights[name].shape == shapes[name]
            weights[name].copy_(torch.arange(weights[name].numel()).view(weights[name].shape) + value)
            weights.written(name)
        weights.end()
        for name, (e, rows, columns) in shapes.items():
            runs = model.get_parameter(name)
            assert runs.data_ptr() == places[name] and runs.is_contiguous()
            wanted = (torch.arange(e * rows * columns) + value).view(e, rows, columns)
            assert torch.equal(runs, wanted.transpose(1, 2) if transposes else wanted)
        assert model.experts.map.tolist() == [1, 0] and model.dispatcher.splits["experts"].tolist() == [3, 1]


def test_what_vllm_ascend_keeps_beside_the_model_comes_back_too(model, monkeypatch):
    model.experts.map, beside = torch.tensor([1, 0]), Dispatcher()
    model.dispatcher = Dispatcher()
    method = SimpleNamespace(token_dispatcher=beside)
    kept = SimpleNamespace(_MoECommMethods={"alltoall": method})
    parts = "vllm_ascend.ops.fused_moe.moe_comm_method".split(".")
    for count in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:count]), SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, ".".join(parts), kept)
    runner = SimpleNamespace(get_model=lambda: model, model_config=SimpleNamespace(dtype=torch.float32))
    sleeping = SleepMode(Sleeper(model, False), runner)
    for _ in range(2):
        sleeping.sleep()
        beside.splits["experts"].zero_()
        sleeping.wake_weights()
        assert beside.splits["experts"].tolist() == [3, 1]


def test_what_waits_for_sleep_is_neither_cache_nor_parameter_nor_buffer(model):
    model.register_buffer("kept", torch.ones(3))
    model.norm.kv_cache, model.norm.scale = [torch.ones(5)], torch.tensor(0.5)
    model.view = model.embedding.weight[1:]
    [found] = plain_tensors(model)
    assert found is model.norm.scale


def refresh(weights, value):
    """Write what is not held; returns the names."""
    weights.begin()
    written = [name for name in weights if name not in weights.held]
    for name in written:
        weights[name].fill_(value)
        weights.written(name)
    weights.end()
    return written


def test_what_is_kept_is_written_once_and_outlives_a_sleep_of_packed_weights(model):
    weights = PackedWeights(model, torch.float32)
    weights.kept = frozenset({"linear.weight", "norm.weight"})
    weights.release()
    assert memory(weights) == set()
    assert set(refresh(weights, 2.0)) == set(weights)
    weights.release()
    assert memory(weights) == weights.kept and (model.linear.cpu_linear._packed == 2.0).all()
    assert set(refresh(weights, 3.0)) == set(weights) - weights.kept
    assert all((weights[name] == 2.0).all() for name in weights.kept), "there to be proved"
    assert (model.linear.cpu_linear._packed == 2.0).all() and (model.embedding.weight == 3.0).all()


def test_what_is_kept_comes_back_from_the_host_where_vllm_sleeps_itself(model):
    model.experts.map, model.dispatcher = torch.tensor([1, 0]), Dispatcher()
    runner = SimpleNamespace(get_model=lambda: model, model_config=SimpleNamespace(dtype=torch.float32))
    sleeping = SleepMode(Sleeper(model, False), runner)
    weights = sleeping.weights
    weights.kept = frozenset({"linear.weight"})
    sleeping.sleep()
    sleeping.wake_weights()
    assert set(refresh(weights, 2.0)) == set(weights)
    for value in (3.0, 4.0):
        sleeping.sleep()
        assert (model.linear.weight == 0.0).all()
        sleeping.wake_weights()
        assert set(refresh(weights, value)) == set(weights) - weights.kept
        assert (weights["linear.weight"] == 2.0).all() and (model.embedding.weight == value).all()
