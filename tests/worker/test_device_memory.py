"""Test what is on a device when: the program's own order of calls, against what `plan` prints, byte for byte."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from spmd_rl.config.config import Config, ModelConfig, RunConfig
from spmd_rl.config.names import MEMORY_PHASES, Phase
from spmd_rl.distributed.layout import RolloutLayout, TrainLayout
from spmd_rl.errors import ConfigError
from spmd_rl.models.model_shape import read_model_shape
from spmd_rl.plan.__main__ import configure
from spmd_rl.plan.case import Case
from spmd_rl.plan.memory import memory
from spmd_rl.rollout.engine import Engine
from spmd_rl.testing.launcher import ROOT
from spmd_rl.training import learner as learning
from spmd_rl.training import optimizer as optimizing
from spmd_rl.training.learner import Learner
from spmd_rl.training.optimizer import Optimizer
from spmd_rl.weights.device_memory import memory_problems, rank_bytes
from spmd_rl.worker import base_worker, device_switch, shard_saver, train_worker, trainer
from tests.worker.accounting import LLM, Counted, Device, Model, OutOfMemory, states

GIB, BUCKETS = 2**30, 3 << 20
NOTHING = dict.fromkeys(("device", "prompt_tokens", "response_tokens"))
QWEN_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "eos_token_id": 2,
}


class World:
    """This rank, of four."""

    rank, local_rank, node, size, ranks_per_node, payload, control = 0, 0, 0, 4, 4, None, None


@pytest.fixture
def case(tmp_path, request):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    base = Config(ModelConfig(str(tmp_path)), run=RunConfig(platform="cuda"))
    algorithm = replace(base.algorithm, **getattr(request, "param", {"kl_coefficient": 0.1}))
    config = replace(base, algorithm=algorithm, rollout=replace(base.rollout, max_sequences=64, cache_gib=31.0))
    config = replace(config, parallel=replace(config.parallel, tensor=2), train=replace(config.train, steps=1))
    train, rollout = TrainLayout.of(config.parallel, 4), RolloutLayout.of(config.rollout, 4)
    return Case(config, read_model_shape(tmp_path), train, rollout, 4, True)


def sizes(held):
    """Weights of each model."""
    found = {name: one.weights for name, one in held.learners.items()}
    return found | ({"reference": held.reference} if held.reference else {})


class Machine:
    """A rank of the program over a device that counts, through start, two steps and a checkpoint."""

    def __init__(self, case: Case, patch: pytest.MonkeyPatch, total: int):
        self.case, self.device, self.peaks = case, Device(total), {}
        held = rank_bytes(case.config, case.shape, case.train, case.rollout, 0, BUCKETS)
        self.held, device, platform = held, self.device, self.device.platform()
        LLM.device, LLM.held = device, held
        patch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM))
        patch.setattr(Engine, "opened", None)
        built = iter([name for name in ("policy", "reference", "critic") if name in sizes(held)])

        def model(*arguments):
            seen.append(next(built))
            return Model(device, sizes(held)[seen[-1]], case.shape)

        seen: list[str] = []

        class Trained(Learner):
            def __init__(self, model, settings):
                one = held.learners[seen[-1]]
                self.model, self.wrapped = model, []
                self.balance = SimpleNamespace(begin=lambda packs: None, end=dict)
                device.take(model.size)  # Megatron's buffer of weights
                self.gradients = Counted(device, one.gradients)
                device.free(model.size)
                self.gradients.release()
                self.optimizer = object.__new__(Optimizer)
                self.optimizer.wrapped, self.optimizer.waits = [], False
                self.optimizer.parts = states(device, one)
                self.optimizer.zero_gradients = lambda: None
                self.optimizer._ready = lambda rate, bound, sound: (True, 1.0)

        place = SimpleNamespace(rank=0, data_rank=0, tensor_size=2, reports=False)
        patch.setattr(trainer, "start_parallel", lambda layout, seed: place)
        patch.setattr(trainer, "ShardedModel", model)
        patch.setattr(trainer, "Learner", Trained)
        patch.setattr(trainer, "ValueLoss", lambda loss: Nothing())
        patch.setattr(optimizing, "current", lambda: platform)
        patch.setattr(learning, "run_passes", lambda *arguments, **options: self._pass())
        patch.setattr(train_worker, "RewardModelScorer", lambda *arguments: None)
        patch.setattr(train_worker, "GaeEstimator", lambda trainer: None)
        patch.setattr(train_worker, "ConsistencyCheck", lambda *arguments: None)
        patch.setattr(base_worker, "ImageStore", lambda *arguments: SimpleNamespace(of=lambda *row: None))
        patch.setattr(base_worker, "Rollouts", lambda *arguments: None)
        patch.setattr(base_worker, "end_tokens", lambda *arguments: ())
        patch.setattr(base_worker, "templates_of", lambda *arguments: ())
        patch.setattr(base_worker, "ResponseText", lambda *arguments: None)
        patch.setattr(device_switch, "Checksums", lambda *arguments: Nothing())
        patch.setattr(device_switch, "verify", lambda *arguments: None)
        patch.setattr(device_switch, "WeightTransfer", lambda *arguments, **options: self)
        patch.setattr(shard_saver, "TrainingState", lambda learner, group: Saved(learner))
        patch.setattr(shard_saver, "gather", lambda mine, group: [mine])
        with self.phase(Phase.START):
            self.worker = train_worker.TrainWorker(
                case.config, case.shape, platform, World, {"train": [SimpleNamespace(token_ids=(1,))]}, None, None
            )

    def phase(self, name):
        return self.device.phase(name, self.peaks)

    def _pass(self):
        self.on_device()

    def on_device(self):
        """See that where a learner computes, nothing of the engine is there."""
        assert self.worker.engine.asleep and self.device.mapped == 0 and self.device.expandable

    def run(self, read, write, written):
        """Move the weights, as a refresh does: with a few messages at once."""
        self.device.take(BUCKETS)
        self.device.free(BUCKETS)
        return SimpleNamespace(network_bytes=0, local_bytes=0)

    def step(self, directory):
        """One step of training as the loops order it."""
        worker = self.worker
        with self.phase(Phase.TO_ROLLOUT):
            worker.device_switch.to_rollout()
        with self.phase(Phase.ROLLOUT):
            assert self.device.taken == self.held.engine + self.held.cache and not self.device.expandable
        with self.phase(Phase.TO_TRAINING):
            worker.device_switch.to_training()
        for model in ("policy", "reference", "critic"):
            if model in worker.models:
                with self.phase(SCORES[model]):
                    worker.trainer.packs = []
                    worker.trainer.score(model)
        worker.trainer.packs = [[]]
        for model, name in (("critic", Phase.CRITIC_UPDATE), ("policy", Phase.UPDATE)):
            if model in worker.models:
                with self.phase(name):
                    worker.trainer.learn(model, 0, 1e-6)
        with self.phase(Phase.CHECKPOINT):
            directory.mkdir()
            worker.saver.begin_checkpoint(str(directory))
            worker.saver._failed = None


SCORES = {
    "policy": Phase.POLICY_LOGPROBS,
    "reference": Phase.REFERENCE_LOGPROBS,
    "critic": Phase.CRITIC_VALUES,
}


class Nothing:
    """Checksums that say nothing."""

    def __getattr__(self, name):
        return lambda *arguments: None


class Saved:
    """A learner's state, which is read on the device."""

    def __init__(self, learner):
        self.learner = learner

    def begin_save(self, directory, broken):
        for part in self.learner.optimizer.each():
            assert self.learner.model.here and part.here

    def finish_save(self):
        return True


def planned(case):
    held = memory(case, [BUCKETS] * 4, None)["phases"]
    return {phase: spread["most"] for phase, spread in held.items()}


ALGORITHMS = [{"kl_coefficient": 0.1}, {"kl_coefficient": 0.0}, {"advantage": "gae", "kl_coefficient": 0.1}]


@pytest.mark.parametrize("case", ALGORITHMS, indirect=True)
def test_every_phases_peak_is_what_plan_prints_and_a_device_of_just_that_size_will_do(case, monkeypatch, tmp_path):
    expected = planned(case)
    machine = Machine(case, monkeypatch, max(expected.values()))
    machine.step(tmp_path / "1")
    first = dict(machine.peaks)
    machine.step(tmp_path / "2")
    assert first == machine.peaks == expected and set(expected) <= {
        *MEMORY_PHASES.values(),
        *SCORES.values(),
        "checkpoint",
    }
    assert max(machine.peaks.values()) == machine.device.total


def resident(patch):
    """The learners stay while the engine is built."""
    patch.setattr(Learner, "offload", lambda self: None)


def vllms_own_share(patch):
    """They do, and vLLM counts on its 0.92 of the device."""
    resident(patch)
    patch.setattr("spmd_rl.rollout.engine.memory_of_engine", lambda free, total, weights, cache: (0.92, cache))


def kept(patch):
    """Torch's allocator keeps what the trainer freed."""
    patch.setattr(Device, "give_back", lambda self: None)


def kept_before_the_cache(patch):
    """It keeps the weights that a refresh has read."""
    switch, give_back = device_switch.DeviceSwitch, Device.give_back
    hand_over, wake_weights = switch._hand_over, Engine.wake_weights

    def refreshing(self):
        patch.setattr(Device, "give_back", lambda device: None)
        wake_weights(self)

    def handed(self, training):
        patch.setattr(Device, "give_back", give_back)
        hand_over(self, training)

    patch.setattr(Engine, "wake_weights", refreshing)
    patch.setattr(switch, "_hand_over", handed)


def optimizer_stays(patch):
    """The optimizer is on the device during a refresh."""
    patch.setattr(Optimizer, "offload", lambda self: None)


def optimizer_all_along(patch):
    """It is there beside activations."""
    patch.setattr(Learner, "onload", lambda self: (self.model.onload(), [one.onload() for one in self.optimizer.parts]))


def optimizer_as_a_whole(patch):
    """All of it is there in a step."""
    patch.setattr(Optimizer, "each", lambda self, of=None: ([one.onload() for one in self.parts], self.parts)[1])


def segments(patch):
    """Torch's segments may grow while vLLM makes its pools."""
    patch.setattr(
        device_switch.DeviceSwitch, "_hand_over", lambda self, training: self.platform.expandable_segments(True)
    )


ORDERS = (resident, vllms_own_share, kept, kept_before_the_cache, optimizer_stays, optimizer_all_along)
ORDERS += (optimizer_as_a_whole, segments)


@pytest.mark.parametrize("order", ORDERS)
def test_each_order_that_does_not_fit_is_found_out(case, monkeypatch, tmp_path, order):
    expected = planned(case)
    order(monkeypatch)
    with pytest.raises((OutOfMemory, ValueError, AssertionError)):
        machine = Machine(case, monkeypatch, max(expected.values()))
        machine.step(tmp_path / "1")
        machine.step(tmp_path / "2")
        assert machine.peaks == expected


def test_a_second_engine_of_a_process_is_refused_with_the_way_out(case, monkeypatch):
    machine = Machine(case, monkeypatch, 80 * GIB)
    with pytest.raises(ConfigError, match=r"Engine: this process has one already.*close\(\) it first"):
        Engine(*[None] * 11)
    monkeypatch.setattr(Engine, "opened", None)  # as closing it does
    assert Machine(case, monkeypatch, 80 * GIB).worker.engine is not machine.worker.engine


def test_models_larger_than_a_device_are_refused_at_start_and_by_plan_in_the_same_words(case, monkeypatch):
    small = 25 * GIB
    with pytest.raises(ConfigError) as planned_words:
        memory(case, [0] * 4, small)
    words = str(planned_words.value)
    assert "rollout.cache_gib = 31.00: the engine's weights on this rank are 14.19 GiB" in words
    large = replace(case.config, rollout=replace(case.config.rollout, cache_gib=1.0))
    with pytest.raises(ConfigError) as planned_words:
        memory(replace(case, config=large), [0] * 4, small)
    with pytest.raises(ConfigError) as met:
        Machine(replace(case, config=large), monkeypatch, small)
    assert str(met.value) == str(planned_words.value)
    assert "parallel.tensor = 2: in start rank 0 holds" in str(met.value) and "share the optimizer" in str(met.value)
    held = {0: rank_bytes(large, case.shape, case.train, case.rollout, 0)}
    assert memory_problems(large, held, 100 * GIB) == []


SHIPPED = [("grpo_deepseek_r1_671b_a3", 384), ("grpo_qwen25_32b_a3", 16), ("grpo_qwen25_7b_a2", 8)]


@pytest.mark.parametrize(("config", "ranks"), SHIPPED)
def test_the_shipped_configurations_fit_into_dies_of_64_gb_with_room_for_what_a_pass_computes(config, ranks):
    options = SimpleNamespace(world_size=ranks, rank=None, ranks_per_node=16, **NOTHING)
    planned, _ = configure(options, ["--config", str(ROOT / "configs" / f"{config}.yaml")])
    found = memory(planned, [4 * 256 << 20] * ranks, int(64e9))
    margins = {phase: spread["margin"] / GIB for phase, spread in found["phases"].items()}
    assert min(margins.values()) > 12, margins


def seven_billion(ranks):
    """The configuration for eight GPUs of 80 GB, on fewer of them."""
    options = SimpleNamespace(world_size=ranks, rank=None, ranks_per_node=ranks, **NOTHING)
    file = str(ROOT / "configs" / "grpo_qwen25_7b_8gpu.yaml")
    planned, _ = configure(options, ["--config", file, "--parallel.tensor", str(ranks), "--rollout.tensor", str(ranks)])
    phases = memory(planned, [4 * 256 << 20] * ranks, int(79.6 * GIB))["phases"]
    return {phase: spread["margin"] / GIB for phase, spread in phases.items()}


@pytest.mark.parametrize(("ranks", "least"), [(1, {"start": 22, "update": 30}), (2, {"start": 50, "update": 50})])
def test_seven_billion_parameters_train_on_one_gpu_which_has_their_optimizer_in_parts(ranks, least):
    margins = seven_billion(ranks)
    for phase, margin in margins.items():
        assert margin > least.get(phase, 30), margins
