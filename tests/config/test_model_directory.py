"""Test what can be named as a model: directories, runs, checkpoints of runs."""

import json

import pytest

from spmd_rl.config.model_directory import ModelDirectory, find_model
from spmd_rl.errors import ConfigError


def hf(directory):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    return directory


def saved(run, step, model):
    directory = run / "checkpoints" / f"step_{step:06d}"
    (directory / "training").mkdir(parents=True)
    (directory / "training" / "metadata.json").write_text("{}")
    (directory / "state.json").write_text(json.dumps({"step": step, "settings": {"model.path": str(model)}}))
    return directory


def test_a_hugging_face_directory_is_itself(tmp_path):
    model = str(hf(tmp_path / "model"))
    assert find_model("model", model) == ModelDirectory(model, model)


def test_a_converted_checkpoint_has_its_companions_inside(tmp_path):
    hf(tmp_path / "one" / "hf")
    (tmp_path / "one" / "metadata.json").write_text("{}")
    assert find_model("model", str(tmp_path / "one")).config == str(tmp_path / "one" / "hf")


def test_a_run_is_what_it_exported_or_else_its_newest_checkpoint(tmp_path):
    model, run = hf(tmp_path / "model"), tmp_path / "runs" / "mine"
    saved(run, 2, model)
    newest = saved(run, 10, model)
    (run / "checkpoints" / "step_000012.partial").mkdir()
    assert find_model("model", str(run)) == ModelDirectory(str(newest / "training"), str(model))
    assert find_model("model", str(newest)) == find_model("model", str(newest / "training"))
    assert find_model("model", str(newest)) == ModelDirectory(str(newest / "training"), str(model))
    hf(run / "hf")
    assert find_model("model", str(run)).weights == str(run / "hf")


@pytest.mark.parametrize(
    "files, said",
    [
        ([], "there is no such directory"),
        (["other.txt"], "it has neither config.json"),
        (["config.yaml"], "this run has neither hf/ nor a checkpoint"),
        (["metadata.json"], "a checkpoint without hf/config.json"),
        (["state.json"], "does not say which model the run began with"),
    ],
)
def test_anything_else_is_refused(tmp_path, files, said):
    directory = tmp_path / "x"
    for name in files:
        directory.mkdir(exist_ok=True)
        (directory / name).write_text("{}")
    with pytest.raises(ConfigError, match=said):
        find_model("model", str(directory))


def test_a_checkpoint_whose_model_is_gone_says_where_to_start(tmp_path):
    directory = saved(tmp_path / "run", 1, tmp_path / "gone")
    with pytest.raises(ConfigError, match="the run began with .*gone"):
        find_model("model", str(directory))
