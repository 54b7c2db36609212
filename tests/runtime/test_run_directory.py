"""Test that what is in a run's directory is moved when somebody asked for it; without starting ranks."""

import dataclasses
import json

import pytest
from torch.distributed import HashStore

from spmd_rl.config.config import Config, ModelConfig, RunConfig, TrainConfig
from spmd_rl.config.loading import dump
from spmd_rl.distributed.world import World
from spmd_rl.runlog.run_dir import finished_steps
from spmd_rl.runtime.run_directory import hold, keep_finished

CONFIG = Config(ModelConfig("some/model"), train=TrainConfig(steps=3), run=RunConfig(name="sums"))


def alone(begun=False):
    world = World(0, 1, 0, 1, None, None, HashStore())
    if begun:
        world.begin()
    return world


def leave(directory, steps, model=True, config=CONFIG):
    """Leave what a run of so many steps leaves."""
    (directory / "config.yaml").write_text(dump(config))
    (directory / "metrics.jsonl").write_text("".join(json.dumps({"step": n + 1}) + "\n" for n in range(steps)))
    if model:
        (directory / "hf").mkdir()


def told(resume):
    return dataclasses.replace(CONFIG, checkpoint=dataclasses.replace(CONFIG.checkpoint, resume=resume))


def test_a_finished_run_is_moved_only_when_somebody_asks_for_it(tmp_path):
    leave(tmp_path, 3)
    with pytest.raises(ValueError) as refused:
        keep_finished(CONFIG, tmp_path, alone())
    assert str(refused.value) == (
        f"run.dir = {tmp_path}: it holds a finished run of 3 steps; give this one a run.name or run.dir of its own, or "
        "begin anew with checkpoint.resume = never, which moves what is there into earlier/"
    )
    with pytest.raises(ValueError, match="run.dir of its own$"):
        keep_finished(told("runs/other/checkpoints/step_000003"), tmp_path, alone())
    keep_finished(told("never"), tmp_path, alone())
    keep_finished(CONFIG, tmp_path, alone(begun=True))


@pytest.mark.parametrize("steps, model, kept", [(3, True, 3), (2, True, 0), (3, False, 0), (0, False, 0)])
def test_a_run_has_finished_when_all_its_steps_are_done_and_its_model_is_there(tmp_path, steps, model, kept):
    leave(tmp_path, steps, model)
    assert finished_steps(tmp_path) == kept


def test_a_run_without_a_model_to_write_has_finished_with_its_last_step(tmp_path):
    leave(tmp_path, 3, False, dataclasses.replace(CONFIG, run=dataclasses.replace(CONFIG.run, export_hf=False)))
    assert finished_steps(tmp_path) == 3


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"step": "x"}'])
def test_what_is_no_run_is_no_finished_one(tmp_path, content):
    leave(tmp_path, 3)
    (tmp_path / "metrics.jsonl").write_text(content)
    assert finished_steps(tmp_path) == 0
    (tmp_path / "config.yaml").write_text("train: [")
    assert finished_steps(tmp_path) == 0 and finished_steps(tmp_path / "none") == 0


def test_a_directory_is_held_until_the_run_lets_it_go(tmp_path):
    lock = hold(tmp_path / "new", alone())
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["run.lock"]
    lock.release()
    assert list((tmp_path / "new").iterdir()) == []
