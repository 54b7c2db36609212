"""A rollout beside plain vLLM: what is compared."""

from tools import bench_rollout


def test_a_rollouts_median_is_told_in_those_of_plain_vllm():
    measured = {
        "rollout": [{"seconds": value, "cpu_seconds": 3.0} for value in (1.0, 9.0, 2.0)],
        "plain": [{"seconds": value, "cpu_seconds": 2.0} for value in (4.0, 3.0, 5.0)],
    }
    assert bench_rollout.ratios(measured) == {"seconds": 0.5, "cpu_seconds": 1.5}
