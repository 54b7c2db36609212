"""Starting and reading runs from Python, and the notebook that does so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_rl import api, runs
from spmd_rl.errors import ConfigError
from spmd_rl.rewards.grade import Grade

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "notebooks" / "read_a_run.ipynb"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The directory of a finished run of two steps, beside which the test runs."""
    monkeypatch.chdir(tmp_path)
    directory = Path("runs/demo")
    (directory / "samples").mkdir(parents=True)
    rows = [{"step": 0, "eval/sums/accuracy": 0.4}]
    rows += [{"step": n, "grpo/rewards/mean": n / 4, "timing/all": 2.0, "timing/update": 1.0} for n in (1, 2)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for n in (1, 2):
        lines = [
            {"step": n, "question": "2 + 3?", "response": said, "answer": "5", "reward": reward, "cause": cause}
            | {"scores": {"math_answer": reward}}
            for said, reward, cause in (("4", 0.0, "wrong"), ("5", 1.0, "correct"))
        ]
        (directory / f"samples/step_{n:06d}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_metrics_and_samples_are_data_frames(run):
    metrics, samples = api.read_metrics(run), api.read_samples(str(run))
    assert list(metrics.step) == [0, 1, 2] and metrics["grpo/rewards/mean"].max() == 0.5
    assert list(samples["score/math_answer"]) == [0.0, 1.0, 0.0, 1.0] and set(samples.cause) == {"wrong", "correct"}


def test_the_notebook_reads_a_finished_run(run):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    held: dict = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), held)  # noqa: S102
    assert held["sample"].response == "5" and list(held["accuracy"]) == ["eval/sums/accuracy"]


def test_a_response_is_graded_by_any_rule(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "async def later(samples): return [len(s.response) for s in samples]\ndef none(sample): return None\n"
    )
    assert api.grade("It is 5.", "5").correct
    assert api.grade("abc", "", rule=f"{file}:later") == Grade(3.0)
    assert api.grade("abc", "", rule=f"{file}:none") is None


def test_settings_are_words_of_a_command_line():
    given = {"reward.rules": {"acc": 1.0}, "rollout.stop_token_ids": [1, 2], "data.shuffle": False, "run.seed": 3}
    config = api.load_config(None, {"model.path": "m", **given})
    assert config.reward.rules == {"acc": 1.0} and config.rollout.stop_token_ids == (1, 2)
    assert not config.data.shuffle and config.run.seed == 3
    with pytest.raises(ConfigError, match="did you mean train.steps"):
        api.load_config("demo_smollm2_cpu", {"train.step": 1})


def test_a_run_ends_in_an_outcome(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        runs, "_torchrun", lambda module, words, ranks, quiet: (0 if module == "spmd_rl.ppo" else 2, f"{ranks} {words}")
    )
    settings = {"model.path": "m", "algorithm.advantage": "gae"}
    assert api.train(None, settings, ranks=2) == runs.Outcome(0, Path("runs/ppo"), f"2 {runs.words(None, settings)}")
    assert api.train("demo_smollm2_cpu").status == 2
    with pytest.raises(RuntimeError, match="ended with status 2"):
        api.evaluate("m", "gsm8k", output=str(tmp_path))


def test_the_last_lines_of_a_program_are_kept(monkeypatch, capsys):
    real = subprocess.Popen
    program = [sys.executable, "-c", "for n in range(99): print(n)\nraise SystemExit(3)"]
    monkeypatch.setattr(subprocess, "Popen", lambda words, **how: real(program, **how))
    status, said = runs._torchrun("any", [], 1, quiet=False)
    assert status == 3 and said.split() == [str(n) for n in range(59, 99)]
    assert len(capsys.readouterr().out.split()) == 99


@pytest.mark.parametrize("words, status", [(["--train.steps", "0"], 2), (["--help"], 0)])
def test_main_returns_a_status_and_never_ends_the_interpreter(words, status, capfd):
    assert api.main(lambda config, session: None, ["--model.path", "no/such/place", *words]) == status
