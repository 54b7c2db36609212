"""A model's way into a Megatron checkpoint and back: the same bytes, whatever the layout, and whatever goes wrong."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from spmd_rl.distributed.layout import TrainLayout
from spmd_rl.models.model_shape import read_model_shape
from spmd_rl.weights.families import megatron_shard
from spmd_rl.weights.files.checkpoint_layout import checkpoint_shard, pieces_in, rank_chunks
from spmd_rl.weights.files.checkpoint_reader import METADATA, Checkpoint, CheckpointSource
from spmd_rl.weights.files.convert import DifferenceError, Limits, Progress, compare, to_hf, to_megatron
from spmd_rl.weights.files.hf_reader import HfSource, load_shard
from spmd_rl.weights.files.weight_source import fill_shard
from spmd_rl.weights.transfer.boxes import Box, view
from tests.weights.models import models_and_layouts
from tiny_models import make_tiny

ALONE = TrainLayout(1, 1, 1)
SMALL = Limits(slice=30_000, unit=400_000)


@pytest.fixture(scope="module")
def models(tiny_models, tmp_path_factory):
    """Name -> directory: each family, bfloat16, several files, mixed dtypes, score heads."""
    root = tmp_path_factory.mktemp("convert")
    made = {name: Path(path) for name, path in tiny_models.items()}
    made["qwen2_moe"] = make_tiny(root / "qwen2_moe", "qwen2_moe", layers=2, dtype="bfloat16")
    made["qwen3_moe"] = make_tiny(root / "qwen3_moe", "qwen3_moe", layers=2)
    made["deepseek_v3"] = in_files(make_tiny(root / "deepseek_v3", "deepseek_v3", layers=2, dtype="bfloat16"), 3)
    made["llama-value"] = make_tiny(root / "llama-value", "llama", value_head=True, layers=2)
    return made


def in_files(directory, files):
    """Spread a directory's tensors over several files; biases in the choice of experts become float32."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    tensors = {name: t.float() if name.endswith("correction_bias") else t for name, t in tensors.items()}
    weight_map = {}
    for n in range(files):
        file = f"model-{n + 1:05d}-of-{files:05d}.safetensors"
        names = sorted(tensors)[n::files]
        save_file({name: tensors[name] for name in names}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (directory / "model.safetensors.index.json").write_text(text)
    return directory


def contents(directory):
    return {file.name: file.read_bytes() for file in Path(directory).iterdir() if file.is_file()}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", TrainLayout(2, 2, 1)),
        ("qwen2-tied", TrainLayout(4, 1, 1)),
        ("qwen2-tied", TrainLayout(1, 2, 1, virtual=2)),
        ("qwen3", TrainLayout(1, 3, 2, layers_per_stage=(1, 2, 1))),
        ("qwen2_moe", TrainLayout(2, 1, 2, expert=4)),
        ("qwen3_moe", TrainLayout(2, 2, 1, expert_tensor=2)),
        ("deepseek_v3", TrainLayout(2, 1, 1, expert=2)),
        ("llama-value", TrainLayout(2, 1, 1)),
    ],
)
def test_a_directory_comes_back_byte_for_byte(models, tmp_path, name, layout):
    to_megatron(models[name], tmp_path / "checkpoint", layout, limits=SMALL, verify=True)
    assert compare(models[name], tmp_path / "checkpoint") is None
    to_hf(tmp_path / "checkpoint", tmp_path / "hf", limits=SMALL, verify=True)
    assert contents(tmp_path / "hf") == contents(models[name])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "hf"]


@settings(max_examples=60, deadline=None)
@given(models_and_layouts())
def test_chunks_of_all_ranks_make_up_the_checkpoint_and_hold_what_the_ranks_hold(drawn):
    shape, sizes, _ = drawn
    layout = TrainLayout(*sizes)
    whole = checkpoint_shard(shape)
    taken = {key: torch.zeros(size, dtype=torch.int) for key, size in whole.params.items()}
    boxes = {}
    for rank, chunks in enumerate(rank_chunks(shape, layout, whole, 7)):
        for chunk in chunks:
            assert chunk.elements <= max(7, 1)
            view(taken[chunk.tensor], chunk.start, chunk.shape).add_(1)
            for box, _ in pieces_in(chunk, whole.by_param[chunk.tensor]):
                boxes.setdefault(rank, []).append(box)
    assert all((count == 1).all() for count in taken.values())
    for rank, held in boxes.items():
        mine = {piece.tensor for piece in megatron_shard(shape, layout, rank).pieces}
        assert {box.tensor for box in held} <= mine


def test_a_rank_fills_its_shard_from_a_checkpoint_of_another_layout(models, tmp_path):
    to_megatron(models["deepseek_v3"], tmp_path / "checkpoint", TrainLayout(1, 2, 2, expert=2))
    shape = read_model_shape(models["deepseek_v3"])
    source = CheckpointSource(tmp_path / "checkpoint", shape)
    layout = TrainLayout(4, 1, 1, expert=2, expert_tensor=2)
    for rank in range(4):
        shard = megatron_shard(shape, layout, rank)
        expected, filled = ({name: torch.full(size, 9.0) for name, size in shard.params.items()} for _ in range(2))
        load_shard(models["deepseek_v3"], shard, expected, shape)
        fill_shard(source, shard, filled)
        assert all(torch.equal(expected[name], filled[name]) for name in expected)


def interrupted(after):
    """Raises in the so-manieth slice."""
    left = [after]

    def advance(more):
        left[0] -= 1
        if left[0] == 0:
            raise InterruptedError

    return Progress(advanced=advance)


class Listener:
    """Notes what it hears of a conversion."""

    def __init__(self):
        self.started, self.slices = [], []
        self.progress = Progress(lambda *what: self.started.append(what), self.slices.append)


def convert_both(models, tmp_path):
    """The two conversions of a model, as functions of their progress, and what they write."""
    to_megatron(models["llama"], tmp_path / "ready", ALONE, limits=SMALL)
    yield lambda **more: to_megatron(models["llama"], tmp_path / "out", ALONE, limits=SMALL, **more), tmp_path / "ready"
    shutil.rmtree(tmp_path / "out")
    yield lambda **more: to_hf(tmp_path / "ready", tmp_path / "out", limits=SMALL, **more), models["llama"]


def test_an_interrupted_conversion_goes_on_where_it_stopped(models, tmp_path):
    for convert, expected in convert_both(models, tmp_path):
        with pytest.raises(InterruptedError):
            convert(progress=interrupted(60))
        assert not (tmp_path / "out").exists()
        listener = Listener()
        convert(progress=listener.progress, verify=True)
        (_, done, total), _ = listener.started
        assert 0 < done < total
        assert sum(listener.slices) == total - done + total  # the rest written, all of it compared
        assert contents(tmp_path / "out") == contents(expected)
        assert not (tmp_path / "out.partial").exists()


def test_a_changed_source_or_option_starts_anew(models, tmp_path):
    source = shutil.copytree(models["llama"], tmp_path / "source")

    def convert(progress, **more):
        to_megatron(source, tmp_path / "out", ALONE, limits=SMALL, force=True, progress=progress, **more)

    for change in (lambda: {"dtype": torch.bfloat16}, lambda: (source / "model.safetensors").touch() or {}):
        with pytest.raises(InterruptedError):
            convert(interrupted(60))
        listener = Listener()
        convert(listener.progress, **change())
        assert listener.started[0][1] == 0


def test_verification_finds_a_flipped_bit_and_gives_no_name(models, tmp_path):
    with pytest.raises(InterruptedError):
        to_megatron(models["llama"], tmp_path / "out", ALONE, limits=SMALL, progress=interrupted(60))
    values = load_file(models["llama"] / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    flip(next((tmp_path / "out.partial").glob("*.distcp")).parent, values[5, 7:11])
    with pytest.raises(DifferenceError, match=r"model.layers.0.mlp.down_proj.weight\[5, 7\] is .* in the source and"):
        to_megatron(models["llama"], tmp_path / "out", ALONE, limits=SMALL, verify=True)
    assert list(tmp_path.iterdir()) == []


def flip(directory, values):
    """Change the first byte of a run of values, wherever in the checkpoint it is."""
    pattern = values.numpy().tobytes()
    for file in directory.glob("*.distcp"):
        data = bytearray(file.read_bytes())
        at = data.find(pattern)
        if at >= 0:
            data[at] ^= 1
            file.write_bytes(data)
            return
    raise AssertionError("no file holds it")


def test_comparison_finds_a_flipped_bit_afterwards(models, tmp_path):
    to_megatron(models["qwen3"], tmp_path / "checkpoint", TrainLayout(2, 1, 1))
    flip(tmp_path / "checkpoint", load_file(models["qwen3"] / "model.safetensors")["lm_head.weight"][300, 5:9])
    found = compare(models["qwen3"], tmp_path / "checkpoint")
    assert found.startswith("lm_head.weight[300, 5] is") and "1 elements" in found


def test_a_change_of_dtype_leaves_the_bias_of_experts_alone(models, tmp_path):
    to_megatron(models["deepseek_v3"], tmp_path / "checkpoint", ALONE, dtype=torch.float32)
    to_hf(tmp_path / "checkpoint", tmp_path / "hf", dtype=torch.bfloat16, verify=True)
    before, after = (HfSource(path, read_model_shape(path)) for path in (models["deepseek_v3"], tmp_path / "hf"))
    assert {n: h.dtype for n, h in before.headers.items()} == {n: h.dtype for n, h in after.headers.items()}
    assert json.loads((tmp_path / "checkpoint/hf/config.json").read_text())["dtype"] == "float32"


def test_a_language_model_becomes_a_critic_whose_head_is_zero(models, tmp_path):
    to_megatron(models["qwen2-tied"], tmp_path / "checkpoint", TrainLayout(1, 2, 1), labels=1, verify=True)
    assert compare(models["qwen2-tied"], tmp_path / "checkpoint") is None
    to_hf(tmp_path / "checkpoint", tmp_path / "hf")
    shape = read_model_shape(tmp_path / "hf")
    assert (shape.architecture, shape.head, shape.labels) == ("Qwen2ForSequenceClassification", "value", 1)
    given_, made = (load_file(path / "model.safetensors") for path in (models["qwen2-tied"], tmp_path / "hf"))
    assert torch.equal(made.pop("score.weight"), torch.zeros(1, shape.hidden))
    assert made.keys() == given_.keys() and all(torch.equal(made[n], given_[n]) for n in made)


def test_what_is_there_is_replaced_only_when_asked_and_only_by_a_complete_one(models, tmp_path):
    out = tmp_path / "out"
    to_megatron(models["llama"], out, ALONE)
    with pytest.raises(ValueError, match="isn't empty; name another directory, or replace it with force"):
        to_megatron(models["qwen3"], out, ALONE)
    with pytest.raises(InterruptedError):
        to_megatron(models["qwen3"], out, ALONE, force=True, progress=interrupted(5))
    assert compare(models["llama"], out) is None
    to_megatron(models["qwen3"], out, ALONE, force=True)
    assert compare(models["qwen3"], out) is None
    with pytest.raises(ValueError, match="is, holds or lies in"):
        to_hf(out, out / "hf" / "again", force=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").touch()
    with pytest.raises(ValueError, match="neither a model nor a checkpoint"):
        to_hf(out, tmp_path / "home", force=True)


def broken_checkpoints(models, tmp_path):
    """What is wrong -> what the message says."""
    checkpoint = tmp_path / "checkpoint"

    def remake(change):
        shutil.rmtree(checkpoint, ignore_errors=True)
        to_megatron(models["llama"], checkpoint, ALONE)
        change()

    def cut_off():
        file = checkpoint / "__0_0.distcp"
        file.write_bytes(file.read_bytes()[:-5000])

    def another():
        shutil.copy(models["qwen3_moe"] / "config.json", checkpoint / "hf" / "config.json")

    def narrower():
        file = checkpoint / "hf" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 128}))

    yield remake, cut_off, r"__0_0.distcp: cut off: it has \d+ bytes, .* ends at \d+"
    yield remake, another, "not a qwen3_moe model .* lacks decoder.layers.0.self_attention.q_layernorm.weight"
    yield remake, narrower, r"linear_fc1.weight has shape \(512, 128\), config.json means \(256, 128\)"
    yield remake, lambda: (checkpoint / METADATA).write_bytes(b"nonsense"), ".metadata: broken"
    yield remake, lambda: (checkpoint / "metadata.json").unlink(), "no metadata.json in it"
    yield remake, lambda: (checkpoint / "__0_0.distcp").unlink(), "__0_0.distcp: not there; it holds"


def test_a_broken_checkpoint_is_refused_by_name(models, tmp_path):
    for remake, change, message in broken_checkpoints(models, tmp_path):
        remake(change)
        with pytest.raises(ValueError, match=message):
            to_hf(tmp_path / "checkpoint", tmp_path / "hf")
        assert not (tmp_path / "hf").exists()


def test_a_cut_off_safetensors_file_and_a_full_disk_are_refused(models, tmp_path, monkeypatch):
    source = shutil.copytree(models["llama"], tmp_path / "source")
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: free)
        with pytest.raises(ValueError, match=r"[\d,]+ bytes have to be written and 1,000 are free"):
            to_megatron(source, tmp_path / "out", ALONE)
    (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors: broken or cut off"):
        to_megatron(source, tmp_path / "out", ALONE)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


class _Harm:
    def __reduce__(self):
        return Path.touch, (Path("harm"),)


def test_metadata_can_name_nothing_but_metadata(models, tmp_path, monkeypatch):
    to_megatron(models["llama"], tmp_path / "checkpoint", ALONE)
    (tmp_path / "checkpoint" / METADATA).write_bytes(pickle.dumps(_Harm()))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="broken .*it names"):
        Checkpoint(tmp_path / "checkpoint")
    assert not Path("harm").exists()


def test_a_dense_model_has_no_experts_to_share(models, tmp_path):
    with pytest.raises(ValueError, match=r"parallel.expert = 2: a llama model has no experts"):
        to_megatron(models["llama"], tmp_path / "out", TrainLayout(2, 1, 1, expert=2))


def test_a_box_is_read_across_chunks(models, tmp_path):
    to_megatron(models["llama"], tmp_path / "checkpoint", TrainLayout(4, 1, 1), limits=SMALL)
    checkpoint = Checkpoint(tmp_path / "checkpoint", cache_bytes=0)
    key = "decoder.layers.1.mlp.linear_fc2.weight"
    part = torch.empty(100, 150)
    checkpoint.copy(Box(key, (20, 50), (100, 150)), part)
    tensors = load_file(models["llama"] / "model.safetensors")
    assert torch.equal(part, tensors["model.layers.1.mlp.down_proj.weight"][20:120, 50:200])
