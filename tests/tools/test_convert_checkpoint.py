"""The command: what it says and how it ends."""

import importlib.util
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from spmd.ranks import run_program

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "convert_checkpoint.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("convert_checkpoint", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tool, capsys):
    """Arguments -> exit code, what was printed, and what was printed as an error."""

    def run(*arguments):
        code = tool.main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def files(directory):
    return {file.name: file.read_bytes() for file in Path(directory).iterdir()}


@pytest.mark.spmd
def test_two_processes_convert_there_and_back(tiny_models, tmp_path):
    there = ["to-megatron", "--hf", tiny_models["qwen3"], "--output", tmp_path / "checkpoint", "--pipeline", "2"]
    back = ["to-hf", "--checkpoint", tmp_path / "checkpoint", "--output", tmp_path / "hf"]
    for command in ([*there, "--tensor", "2"], back):
        said = run_program(str(TOOL), 2, *command, "--verify")
        assert "(process 0 of 2)" in said and "MB/s" in said and "is complete" in said
    assert files(tmp_path / "hf") == files(tiny_models["qwen3"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "hf"]


def test_a_changed_checkpoint_is_told_by_name_slice_and_both_values(run, tiny_models, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    code, said, _ = run("to-megatron", "--hf", tiny_models["llama"], "--output", checkpoint)
    assert code == 0 and "written: 2.9 of 2.9 MB" in said and f"{checkpoint} is complete" in said
    assert run("verify", "--hf", tiny_models["llama"], "--checkpoint", checkpoint)[0] == 0
    other = shutil.copytree(tiny_models["llama"], tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    value = tensors["model.norm.weight"][3].item()
    tensors["model.norm.weight"][3] = 0.5
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    code, _, error = run("verify", "--hf", other, "--checkpoint", checkpoint)
    assert code == 1
    assert f"different: model.norm.weight[3] is 0.5 in the source and {value} in what was written; 1 elements" in error
    assert error.count("\n") == 1
    code, _, error = run("verify", "--hf", tiny_models["qwen3"], "--checkpoint", checkpoint)
    assert code == 1
    assert "q_proj.weight is (256, 128) in the source and (128, 128) in what was written: qwen3 and llama" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tensor", 3), "--tensor: 4 attention heads don't divide by 3; use a size that divides 4"),
        (("--pipeline", 3), "--pipeline = 3: the model's 4 layers don't divide by it; --layers-per-stage: [1, 1, 2]"),
        (("--layers-per-stage", 1, 3), "--layers-per-stage = [1, 3]: it has 2 entries, pipeline x virtual = 1 x 1"),
        (("--expert", 2), "--expert = 2: a llama model has no experts; use 1"),
        (("--tensor", 0), "--tensor = 0: a parallel size is at least 1"),
        (("--hf", "nowhere"), "--hf = nowhere: there is no such directory"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line_with_the_flag(run, tiny_models, tmp_path, arguments, message):
    code, _, error = run("to-megatron", "--hf", tiny_models["llama"], "--output", tmp_path / "out", *arguments)
    assert code == 2
    assert message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_output_in_the_way_needs_force(run, tiny_models, tmp_path):
    command = ("to-megatron", "--hf", tiny_models["llama"], "--output", tmp_path / "out", "--head", "value")
    assert run(*command)[0] == 0
    code, _, error = run(*command)
    assert code == 2 and "isn't empty; name another directory, or replace it with --force" in error
    assert run(*command, "--force")[0] == 0
    code, _, error = run("to-hf", "--checkpoint", tiny_models["llama"], "--output", tmp_path / "hf")
    assert code == 2 and "--hf-config" in error
