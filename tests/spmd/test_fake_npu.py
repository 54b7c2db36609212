"""The program as it runs on NPUs, through vendor packages that stand for the real ones on a CPU (tests/fake_npu).

The record of NPUs claims the device, patches Megatron-Core and vLLM, hands the device over, refreshes an engine whose
experts lie transposed and whose sleep loses tensors, and proves each refresh; what comes out is what a CPU computes.
"""

import pytest

from spmd.ranks import run_ranks
from spmd.whole import RESPONSE, case, check_greedy, run

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SERVER = "spmd.npu_server"
ALGORITHM = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}
# Ranks, family, layout of training.
TRAINED = [
    (2, "qwen2-tied", {"tensor": 2}),
    (2, "qwen2-tied", {"pipeline": 2}),
    (2, "qwen3_moe", {"expert": 2}),
    (2, "deepseek_v3", {"tensor": 2, "expert": 2}),
    (4, "qwen3_moe", {"expert": 2, "pipeline": 2}),
]
# Family -> training's tensor, context and pipeline and rollout's tensor on two ranks, and more settings.
WHOLE = {
    "qwen2-tied": ((2, 1, 1, 2), {}),
    "qwen3_moe": ((1, 1, 1, 2), {"parallel.expert": 2, "rollout.expert_parallel": True}),
    "deepseek_v3": ((2, 1, 1, 1), {"parallel.expert": 2, "rollout.data": 2, "rollout.expert_parallel": True}),
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


@pytest.fixture(scope="module")
def runs(tiny_models, tmp_path_factory):
    """Return what two ranks say of each family, on a CPU and on NPUs, and where each was exported."""
    found = {}
    for place, server in (("cpu", "spmd.server"), ("npu", SERVER)):
        exports = tmp_path_factory.mktemp(place)
        cases = [
            case(tiny_models[family], *layout, exports / family, **more) for family, (layout, more) in WHOLE.items()
        ]
        found[place] = dict(zip(WHOLE, run(2, cases, server), strict=True)), exports
    return found


@pytest.mark.parametrize("family", WHOLE)
def test_two_steps_on_npus_are_those_of_a_cpu_and_each_refresh_is_proved(runs, family):
    (cpu, _), (npu, exports) = runs["cpu"], runs["npu"]
    for mine, other in zip(cpu[family][0]["rounds"], npu[family][0]["rounds"], strict=True):
        assert other["responses"] == mine["responses"]
        for name in ("grad_norm", "actor/pg_loss", "actor/entropy"):
            assert other["learned"][name] == pytest.approx(mine["learned"][name], rel=1e-4, abs=1e-6), name
        # Both engines say the same of the same tokens: the proof has compared weights, this what they compute.
        assert other["learned"]["correction/logprob_gap_max"] < 1e-4
        assert other["canary"]["correction/canary_gap"] < 1e-4
    assert npu[family][0]["engine"] == npu[family][0]["shard"]
    check_greedy(npu[family][0], exports / family, RESPONSE)
