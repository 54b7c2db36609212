"""The laws on a real model: SmolLM2-135M-Instruct."""

import pytest
import torch

from spmd.ranks import run_ranks
from spmd.whole import case, check_greedy, run

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_megatron_gives_the_log_probabilities_of_huggingface(smollm2):
    from transformers import AutoModelForCausalLM

    from spmd.samples import make_samples

    case = {"model": smollm2, "parallel": {}, "share": True, "budget": 4096, "temperature": 1.0}
    found = run_ranks("spmd.training_ranks", 1, {"cases": [case]})[0]["cases"][0]["logprobs"]
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation="eager")
    samples, _ = make_samples(model.config.vocab_size)
    for name, sample in samples.items():
        with torch.no_grad():
            logits = model(torch.cat([sample.prompt, sample.response])[None]).logits[0]
        log_p = logits[len(sample.prompt) - 1 : -1].log_softmax(-1)
        expected = log_p.gather(1, sample.response[:, None].long())[:, 0] * sample.loss_mask
        assert found[str(name)] == pytest.approx(expected.tolist(), abs=1e-3)


def test_vllm_and_megatron_agree_and_an_update_reaches_vllm(smollm2, tmp_path):
    others = {"train.learning_rate": 1e-5, "rollout.cache_gib": 0.1}
    report = run(2, [case(smollm2, 1, 1, 2, 1, tmp_path / "hf", **others)])[0][0]
    for one in report["rounds"]:
        assert one["learned"]["correction/logprob_gap_max"] < 1e-3
        assert one["learned"]["grad_norm"] > 0.1
    check_greedy(report, tmp_path / "hf", 12)
