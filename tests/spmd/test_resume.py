"""A run that is killed goes on as if it had never been, without anybody's hand."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from spmd.ranks import ROOT
from tiny_models import make_tiny
from tiny_tokenizer import make_tokenizer

RULE = "def variety(sample):\n    return len(set(sample.response)) % 5 / 5\n"
# What a clock or a memory meter says is another time's.
MEASURED = ("time", "timing/", "memory/", "bytes/", "e2e_tps", "update_tps", "vllm_tps", "rollout/response_tps")
MEASURED += ("rollout/imbalance_fraction", "process/")


def command(root, run_dir, *more) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"),
        *("--max-restarts", "2", "-m", "spmd_rl.grpo", "--model.path", str(root / "model"), "--model.dtype", "float32"),
        *("--run.dir", str(run_dir), "--run.platform", "cpu", "--run.samples_logged", "-1"),
        *("--rollout.max_response_length", "10", "--rollout.max_sequences", "8", "--rollout.cache_gib", "0.02"),
        *("--data.max_prompt_length", "120", "--data.eval_problems", "4", "--evaluation.every_steps", "2"),
        *("--train.prompts_per_step", "4", "--algorithm.samples_per_prompt", "4", "--train.learning_rate", "1e-3"),
        *("--algorithm.kl_coefficient", "0.02", "--reward.rules", f"{root / 'rule.py'}:variety", "1.0"),
        *("--train.steps", "6", "--checkpoint.every_steps", "2", *more),
    ]


def start(arguments) -> subprocess.Popen:
    return subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ranks_of(launcher: subprocess.Popen) -> list[psutil.Process]:
    return [child for child in psutil.Process(launcher.pid).children() if "spmd_rl.grpo" in " ".join(child.cmdline())]


def rows(run_dir):
    kept = []
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        kept.append({name: value for name, value in json.loads(line).items() if not name.startswith(MEASURED)})
    return kept


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("resume")
    make_tokenizer(make_tiny(root / "model", "qwen2"))
    (root / "rule.py").write_text(RULE)
    return root


@pytest.fixture(scope="module")
def undisturbed(root):
    run = start(command(root, root / "undisturbed"))
    output, _ = run.communicate(timeout=600)
    assert run.returncode == 0, output[-4000:]
    return root / "undisturbed"


@pytest.fixture(scope="module")
def killed(root):
    """A run whose rank 1 is killed when step 4 is done, while step 2 or step 4 may be on their way to the disk."""
    run_dir = root / "killed"
    run = start(command(root, run_dir))
    said, struck = [], False
    for line in run.stdout:
        said.append(line)
        if not struck and line.startswith("step 4/6"):
            struck = True
            while not (run_dir / "checkpoints" / "latest").exists() and time.sleep(0.05) is None:
                pass
            ranks_of(run)[1].kill()
    assert run.wait(timeout=600) == 0, "".join(said)[-4000:]
    assert struck
    return run_dir, "".join(said)


def test_a_killed_rank_leads_to_a_restart_from_the_last_complete_checkpoint(killed):
    run_dir, said = killed
    assert f"took up {run_dir / 'checkpoints' / 'step_00000'}" in said
    assert "goes on after step" in (run_dir / "run.log").read_text()
    assert not list((run_dir / "checkpoints").glob("*.partial"))
    assert (run_dir / "checkpoints" / "latest").read_text() == "step_000006\n"


def test_weights_samples_and_metrics_are_those_of_the_run_that_was_never_killed(killed, undisturbed):
    run_dir, _ = killed
    for one, other in zip(rows(undisturbed), rows(run_dir), strict=True):
        assert one == other
    for place in ("samples", "evaluations"):
        files = sorted(path.name for path in (undisturbed / place).iterdir())
        assert files == sorted(path.name for path in (run_dir / place).iterdir())
        for name in files:
            assert (undisturbed / place / name).read_bytes() == (run_dir / place / name).read_bytes(), name
    model = "hf/model.safetensors"
    assert (undisturbed / model).read_bytes() == (run_dir / model).read_bytes()


def test_another_layout_takes_up_a_checkpoint_and_a_changed_setting_is_refused_by_name(root, undisturbed):
    saved = undisturbed / "checkpoints" / "step_000004"
    refused = start(command(root, root / "other", "--checkpoint.resume", str(saved), "--algorithm.clip_low", "0.1"))
    output, _ = refused.communicate(timeout=600)
    assert refused.returncode != 0
    assert "algorithm.clip_low = 0.1: the run to go on with had 0.2" in output
    other = start(command(root, root / "other", "--checkpoint.resume", str(saved), "--parallel.tensor", "2"))
    output, _ = other.communicate(timeout=600)
    assert other.returncode == 0, output[-4000:]
    assert f"took up {saved}" in output
    here, there = (
        {row["step"]: row for row in rows(run_dir) if "actor/entropy" in row}
        for run_dir in (undisturbed, root / "other")
    )
    assert set(there) == {5, 6}
    # The first step after it samples from the same weights: the same, but for rounding.
    assert there[5]["actor/entropy"] == pytest.approx(here[5]["actor/entropy"], rel=1e-4)
