"""Runs of a tiny model of experts in half precision: with vLLM's choices its log-probabilities are training's."""

import pytest
from tiny_run import RULE, tiny_rule, tiny_settings

from spmd.ranks import run_program
from spmd_rl.analysis.curves import read_rows
from tiny_models import make_tiny
from tiny_tokenizer import make_tokenizer


@pytest.mark.engine
def test_vllms_choices_take_away_the_gap_that_other_experts_make(tmp_path):
    make_tokenizer(make_tiny(tmp_path / "model", "qwen3_moe"))
    (tmp_path / "rule.py").write_text(RULE)
    largest = {}
    for replay in (False, True):
        words = tiny_settings(
            tmp_path,
            model={"dtype": "bfloat16"},
            rollout={"router_replay": replay, "max_response_length": 24, "max_sequences": 16, "cache_gib": 0.05},
            train={"steps": 3, "prompts_per_step": 8, "learning_rate": 1e-4},
            run={"dir": tmp_path / str(replay)},
        )
        run_program("spmd_rl.grpo", 2, *words, *tiny_rule(tmp_path))
        gaps = [row[name] for row in read_rows(tmp_path / str(replay)) if (name := "correction/logprob_gap_max") in row]
        assert len(gaps) == 3
        largest[replay] = max(gaps)
    # Rounding of half precision stays; a token that goes to other experts has a log-probability of other weights.
    assert largest[True] < 0.15 < 0.3 < largest[False]
