"""The program as it runs on NPUs, through vendor packages that stand for the real ones on a CPU (tests/fake_npu).

The record of NPUs claims the device, patches Megatron-Core and vLLM, trains, hands the device over, and refreshes an
engine whose sleep loses tensors and whose experts lie transposed; loss and gradient are what a CPU computes.
"""

import pytest

from spmd.ranks import run_ranks
from spmd.whole import case, run

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SERVER = "spmd.npu_server"
ALGORITHM = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}
# Ranks, family, layout of training.
TRAINED = [
    (2, "qwen2-tied", {"tensor": 2}),
    (2, "qwen2-tied", {"pipeline": 2}),
    (2, "qwen3_moe", {"expert": 2}),
    (2, "deepseek_v3", {"tensor": 2, "expert": 2}),
    (4, "qwen2-tied", {"tensor": 2, "pipeline": 2}),
    (4, "qwen3_moe", {"tensor": 2, "expert": 2}),
    (4, "deepseek_v3", {"pipeline": 2, "expert": 2}),
]
# Ranks, family -> training's tensor, context and pipeline and rollout's tensor, and more settings; on four ranks there
# are two groups of engines.
SHARED = {"parallel.expert": 2, "rollout.expert_parallel": True}
WHOLE = {
    (2, "qwen2-tied"): ((1, 1, 2, 2), {}),
    (2, "qwen3_moe"): ((1, 1, 1, 2), SHARED),
    (2, "deepseek_v3"): ((2, 1, 1, 1), {"rollout.data": 2, **SHARED}),
    (4, "qwen2-tied"): ((2, 1, 2, 2), {}),
    (4, "qwen3_moe"): ((2, 1, 1, 2), SHARED),
    (4, "deepseek_v3"): ((1, 1, 2, 1), {"rollout.data": 2, **SHARED}),
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_npus_loss_and_gradient_are_those_of_a_cpu(tiny_models, ranks):
    wanted = [(family, layout) for n, family, layout in TRAINED if n == ranks]
    cases = [
        {"model": tiny_models[family], "parallel": layout, "share": True, "budget": 60, "algorithm": ALGORITHM}
        for family, layout in wanted
    ]
    each = [run_ranks("spmd.training_ranks", ranks, {"cases": cases}, server=one) for one in ("spmd.server", SERVER)]
    for cpu, npu in zip(*each, strict=True):
        for what, mine, other in zip(wanted, cpu["cases"], npu["cases"], strict=True):
            assert other["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-4), what
            assert other["sums"] == pytest.approx(mine["sums"], rel=1e-4, abs=1e-5), what
            assert other["logprobs"].keys() == mine["logprobs"].keys(), what
            for sample, logprobs in mine["logprobs"].items():
                assert other["logprobs"][sample] == pytest.approx(logprobs, abs=1e-4), (what, sample)


@pytest.mark.parametrize(("ranks", "family"), WHOLE)
def test_two_steps_of_an_npus_engine_are_refreshed_proved_and_agreed_upon(tiny_models, tmp_path, ranks, family):
    layout, more = WHOLE[ranks, family]
    # A refresh that is not proved ends the ranks.
    [reports] = run(ranks, [case(tiny_models[family], *layout, tmp_path / "hf", **more)], SERVER)
    for one in reports[0]["rounds"]:
        # Both engines say the same of the same tokens: the proof has compared weights, this what they compute.
        assert one["canary"]["correction/canary_gap"] < 1e-4
