"""PPO as a user starts it: what a run leaves behind, and that it goes on as if it had never stopped."""

import json
import os

import pytest
import torch
from tiny_run import make_tiny_run, tiny_rule, tiny_settings

from promised import documented
from spmd.ranks import run_program
from spmd_rl.analysis.compare_runs import compare
from spmd_rl.config.check_critic import read_critic
from spmd_rl.config.loading import load_config
from spmd_rl.weights.files.hf_reader import check_headers, read_headers

pytestmark = pytest.mark.engine

STEPS = 4
SETTINGS = {
    "algorithm": {
        "advantage": "gae",
        "lam": 0.9,
        "kl_coefficient": 0.05,
        "kl_in_reward": True,
        "kl_control": "adaptive",
        "kl_target": 1e-4,
        "kl_horizon": 100,
    },
    "critic": {"learning_rate": 1e-3, "warmup_steps": 1},
    "train": {"steps": STEPS, "epochs": 2, "minibatches": 2, "shuffle_mini_batch": True},
    "evaluation": {"before": False, "after": False},
    "checkpoint": {"every_steps": 1, "keep_last": 9},
}

OF_THE_POLICY = {"actor/entropy", "actor/kl_loss", "actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl", "grad_norm"}
OF_THE_POLICY |= {"actor/grad_norm", "timing/update", "update_tps"}
"""Metrics of its update: a step in which only the critic learns has none."""


def ppo(root, name: str, *more: str) -> str:
    words = tiny_settings(root, run={"dir": root / name}, **SETTINGS)
    return run_program("spmd_rl.ppo", 2, *words, *tiny_rule(root), *more)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of PPO with a critic that begins as the policy, and the same run from its first step on: the optimizer of
    the policy has not made a step there."""
    root = tmp_path_factory.mktemp("ppo")
    make_tiny_run(root)
    output = ppo(root, "whole")
    ppo(root, "rest", "--checkpoint.resume", str(root / "whole" / "checkpoints" / "step_000001"))
    rows = [json.loads(line) for line in (root / "whole" / "metrics.jsonl").read_text().splitlines()]
    return root, output, rows


def test_a_run_says_what_its_critic_begins_as_and_how_it_does(finished):
    root, output, _ = finished
    assert f"critic: begins as {root / 'model'}, with a value head of zeros" in output
    lines = [line for line in output.splitlines() if line.startswith("step ") and "  reward " in line]
    assert len(lines) == STEPS
    assert all(name in line for line in lines for name in ("explained", "vf loss", "tok/s"))
    assert str(root / "whole" / "hf_critic") in output


def test_the_metrics_have_their_names_and_the_phases_fit_into_the_step(finished):
    *_, rows = finished
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        ours = """timing/critic_onload timing/critic_offload critic/explained_variance kl/beta kl/mean
            memory/critic_model/peak_bytes memory/update_critic/peak_bytes variety_rewards/mean""".split()
        assert (documented("ppo", "reference") | {*ours}) - row.keys() <= OF_THE_POLICY
        assert not any(name.startswith("grpo/") for name in row)
        assert row["critic/advantages/mean"] == pytest.approx(0.0, abs=1e-6)
        phases = "rollout old_log_p update reference_model reshard_to_train reshard_to_infer critic_model update_critic"
        parts = sum(row.get(f"timing/{phase}", 0.0) for phase in phases.split())
        assert row["timing/all"] >= parts + row["timing/non_overlap_rule_reward"]
    assert [OF_THE_POLICY - row.keys() for row in rows[1:]] == [set()] * (STEPS - 1)


def test_the_critic_alone_learns_in_its_warm_up(finished):
    *_, rows = finished
    assert "grad_norm" not in rows[0] and "critic/grad_norm" in rows[0]
    assert rows[1]["kl/mean"] == 0.0, "the policy was still the reference"
    assert rows[2]["kl/mean"] > 0.0 < rows[1]["grad_norm"]


def test_a_critic_without_an_idea_begins_at_0_and_gets_one(finished):
    *_, rows = finished
    assert rows[0]["critic/values/max"] == rows[0]["critic/values/min"] == 0.0
    assert rows[-1]["critic/values/max"] > rows[-1]["critic/values/min"]


def test_beta_is_led_by_the_divergence_from_the_next_step_on(finished):
    *_, rows = finished
    beta = 0.05
    for row in rows:
        assert row["kl/beta"] == beta
        beta *= 1.0 + min(max(row["kl/mean"] / 1e-4 - 1.0, -0.2), 0.2) * 16 / 100
        paid = row["critic/score/mean"] - row["critic/rewards/mean"]
        assert (paid > 1e-6) == (row["kl/mean"] > 0.0)


def test_a_run_that_goes_on_is_the_one_that_never_stopped_bit_for_bit(finished):
    root, *_ = finished
    found = compare(root / "whole", root / "rest", range(2, STEPS + 1))
    assert found.difference is None
    assert found.steps == (2, 4) and found.samples == 48
    weights = read_headers(root / "whole" / "hf").keys(), read_headers(root / "whole" / "hf_critic").keys()
    assert found.parameters == sum(map(len, weights))


NAN = "nan:phase=update_critic,step=4,of=loss,rank=1"


@pytest.fixture(scope="module")
def in_another_layout(finished):
    """Return what the run said, and its rows, that goes on from the second step in another layout, with the ratio
    against vLLM's log-probabilities; its critic's loss is no number once in the last step."""
    root, *_ = finished
    saved = root / "whole" / "checkpoints" / "step_000002"
    changed = ["--parallel.tensor", "2", "--algorithm.old_logprobs", "rollout", "--inject", NAN]
    changed += ["--checkpoint.resume_allow", "algorithm.old_logprobs"]
    output = ppo(root, "other", "--checkpoint.resume", str(saved), *changed)
    return output, [json.loads(line) for line in (root / "other" / "metrics.jsonl").read_text().splitlines()]


def test_a_run_goes_on_in_another_layout_with_the_samples_and_but_for_rounding_the_values_of_the_first(
    finished, in_another_layout
):
    rows, rest = finished[2], in_another_layout[1][0]
    assert rest["step"] == 3
    for name in ("critic/score/mean", "critic/score/max", "response_length/mean", "kl/beta", "actor/lr", "critic/lr"):
        assert rest[name] == rows[2][name], name
    for name in """critic/values/mean critic/values/max critic/values/min critic/explained_variance critic/returns/mean
        critic/vf_loss critic/grad_norm actor/grad_norm actor/pg_loss actor/entropy kl/mean""".split():
        assert rest[name] == pytest.approx(rows[2][name], rel=1e-3, abs=1e-5), name


def test_against_vllm_the_ratio_and_the_clipping_are_but_for_rounding_those_against_the_trainer(
    finished, in_another_layout
):
    rows, rest = finished[2], in_another_layout[1][0]
    assert (rest["correction/weight_mean"], rest["correction/clipped_fraction"]) == (1.0, 0.0)
    for name in ("actor/ppo_kl", "actor/pg_clipfrac"):
        assert rest[name] == pytest.approx(rows[2][name], rel=1e-3, abs=1e-5), name


def test_an_update_of_the_critic_that_is_no_number_is_skipped_and_the_policys_is_not(finished, in_another_layout):
    output, rows = in_another_layout
    last = rows[1]
    assert (last["update_critic/skipped"], last["update/skipped"]) == (0.25, 0.0), "one of four updates"
    assert "step 4: the update of the critic was skipped" in output
    (kept,) = (finished[0] / "other" / "skipped").iterdir()
    assert kept.name.startswith("step_000004_minibatch_") and kept.name.endswith("_critic.jsonl")
    assert kept.read_text().strip()


def test_the_exported_critic_is_a_model_that_scores_and_a_run_can_begin_with_it(finished):
    from transformers import AutoModelForSequenceClassification

    root, *_ = finished
    exported = root / "whole" / "hf_critic"
    model = AutoModelForSequenceClassification.from_pretrained(exported, dtype=torch.float32)
    assert model.config.num_labels == 1 and model.score.weight.abs().max() > 0
    source = read_critic(load_config(["--model.path", str(root / "model"), "--critic.path", str(exported)]))
    assert not source.new_head
    check_headers(exported, read_headers(exported), source.stored)
    assert {"tokenizer.json", "config.json"} <= set(os.listdir(exported))
