"""Test what `python -m spmd_rl.verify_resume` says before anything is started."""

import stat
from pathlib import Path

import pytest

from spmd_rl import verify_resume
from spmd_rl.config.loading import load_config
from spmd_rl.verify_resume import main
from tiny_models import make_tiny
from tiny_tokenizer import make_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = make_tiny(tmp_path_factory.mktemp("verify") / "model", "llama", max_positions=2048)
    make_tokenizer(directory)
    return directory


def refused(capsys, *words) -> str:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_its_own_options_can_be_read(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for option in ("--ranks", "--steps", "--every", "--seed", "--by-hand", "--twice", "--other-layout", "--dir"):
        assert option in said


def test_unknown_settings_are_refused_as_a_run_refuses_them(model, tmp_path, capsys):
    said = refused(capsys, "--model.path", model, "--dir", tmp_path / "scratch", "--train.step", 4)
    assert "train.step" in said and "train.steps" in said
    assert not (tmp_path / "scratch").exists()


def test_layouts_that_do_not_fit_are_refused_also_the_other_one(model, tmp_path, capsys):
    words = ("--model.path", model, "--dir", tmp_path / "scratch", "--ranks", 2)
    assert "parallel.tensor = 3" in refused(capsys, *words, "--parallel.tensor", 3)
    assert "parallel.pipeline = 3" in refused(capsys, *words, "--other-layout", "--parallel.pipeline 3")


def test_steps_that_end_at_the_first_checkpoint_are_refused(model, capsys):
    said = refused(capsys, "--model.path", model, "--steps", 2, "--every", 2)
    assert "--steps = 2, --every = 2" in said


def test_nobodys_directory_is_touched(model, tmp_path, capsys):
    own = tmp_path / "mine"
    own.mkdir()
    (own / "metrics.jsonl").write_text("{}\n")
    said = refused(capsys, "--model.path", model, "--run.dir", own, "--dir", own)
    assert "the run's own directory" in said
    said = refused(capsys, "--model.path", model, "--dir", own)
    assert "not empty" in said
    assert (own / "metrics.jsonl").read_text() == "{}\n"


def test_faults_of_the_run_are_left_out_and_its_file_is_nobody_elses_to_read(model, tmp_path, monkeypatch):
    words = ["--model.path", str(model), "--inject", "kill:step=1"]
    options, rest = verify_resume._parse([*words, "--dir", str(tmp_path / "scratch"), "--ranks", "1"])
    plan = verify_resume._plan(options, rest)
    assert plan.config.inject == ()
    monkeypatch.setattr(verify_resume, "LaunchedRun", lambda arguments, *_: arguments)
    _, file = verify_resume._launched(plan, plan.config, plan.directory / "killed", "once", 0)
    assert stat.S_IMODE(Path(file).stat().st_mode) == 0o600
    assert load_config(["--config", file]).inject == ()
