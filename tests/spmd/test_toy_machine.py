"""A machine of another package, in one file: the whole stack runs on it, with its own attention and message sizes.

Its attention sees nothing but gathered keys and cumulative lengths, which is what the kernels of accelerators take.
"""

from pathlib import Path

import pytest

from spmd.ranks import run_ranks
from spmd.whole import RESPONSE, case, check_greedy, run
from tests.platforms.installed import installed

pytestmark = pytest.mark.engine

ALGORITHM = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}
# Of four ranks; what is left is data parallel. By family: Megatron-Core cuts experts by tensor only with sequence
# parallelism.
LAYOUTS = {
    "qwen2-tied": [{"tensor": 2, "context": 2}, {"tensor": 2, "pipeline": 2, "sequence": False}],
    "deepseek_v3": [{"context": 2, "pipeline": 2}],
}
MORE_LAYOUTS = {
    "qwen2-tied": [{"context": 2, "pipeline": 2}, {"pipeline": 2, "virtual": 2}],
    "deepseek_v3": [{"tensor": 2, "context": 2}, {"pipeline": 2, "virtual": 2}],
}
"""With --full."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Return where a rank finds the machine."""
    return installed(tmp_path_factory.mktemp("toy_machine"))


def test_its_attention_gives_the_loss_and_gradient_of_the_cpus_in_every_layout(paths, tiny_models, pytestconfig):
    layouts = [(family, one) for family, them in LAYOUTS.items() for one in them]
    if pytestconfig.getoption("full"):
        layouts += [(family, one) for family, them in MORE_LAYOUTS.items() for one in them]
    wanted = [(family, layout, share) for family, layout in layouts for share in (True, False)]
    cases = [
        {
            "model": tiny_models[family],
            "parallel": layout,
            "platform": platform,
            "share": share,
            "budget": 60,
            "algorithm": ALGORITHM,
        }
        for family, layout, share in wanted
        for platform in ("cpu", "toy")
    ]
    reports = run_ranks("spmd.training_ranks", 4, {"cases": cases, "paths": paths})
    for report in reports:
        found = report["cases"]
        for what, cpu, other in zip(wanted, found[::2], found[1::2], strict=True):
            assert other["grad_norm"] == pytest.approx(cpu["grad_norm"], rel=1e-5), what
            assert other["tokens"] == cpu["tokens"] and other["sums"].keys() == cpu["sums"].keys(), what
            for name, value in cpu["sums"].items():
                assert other["sums"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), (what, name)
            assert other["logprobs"].keys() == cpu["logprobs"].keys(), what
            for sample, logprobs in cpu["logprobs"].items():
                assert other["logprobs"][sample] == pytest.approx(logprobs, abs=1e-5), (what, sample)
        for shared, apart in zip(found[1::4], found[3::4], strict=True):
            assert shared["grad_norm"] == pytest.approx(apart["grad_norm"], rel=1e-5)
            assert shared["tokens"] < apart["tokens"]


def test_rollout_exchange_packing_and_updates_run_on_it(paths, tiny_models, tmp_path):
    given = case(tiny_models["qwen2-tied"], 1, 1, 1, 2, tmp_path / "hf")
    [reports] = run(2, [given], platform="toy", paths=paths)
    for one in reports[0]["rounds"]:
        assert one["learned"]["grad_norm"] > 0.01
        assert one["learned"]["correction/logprob_gap_max"] < 1e-4
        assert one["canary"]["correction/canary_gap"] < 1e-4
    assert len({report["weights"] for report in reports}) == 1
    check_greedy(reports[0], tmp_path / "hf", RESPONSE)


def test_checkpoints_are_written_and_read_where_no_process_may_be_copied(paths, tiny_models, tmp_path):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    steps = [["save", a], ["children", a], ["load", a], ["save", b]]
    asked = {"model": tiny_models["qwen3"], "steps": steps, "platform": "toy", "paths": paths}
    for one in run_ranks("spmd.checkpoint_ranks", 2, asked):
        assert one["said"] == [None, [], [], None]
    sizes = [sorted(file.stat().st_size for file in (tmp_path / name).rglob("*.distcp")) for name in "ab"]
    assert sizes[0] == sizes[1] and sizes[0]


# Of two ranks.
STEPPED = [("qwen2-tied", {}), ("qwen2-tied", {"tensor": 2}), ("qwen3", {"pipeline": 2}), ("qwen3_moe", {"expert": 2})]


def test_an_optimizer_in_parts_that_wait_on_the_host_steps_saves_and_loads_as_a_whole_one(paths, tiny_models, tmp_path):
    def asked(family, layout, dtype, checkpoint, begins, **more):
        training = {"model": tiny_models[family], "parallel": layout, "dtype": dtype, "algorithm": ALGORITHM}
        saved = {"checkpoint": str(tmp_path / checkpoint), "begins": begins}
        return {**training, **saved, "platform": "toy", "share": True, "budget": 60, **more}

    parts = {"part_bytes": 50_000}
    wanted = [(*one, "bfloat16" if n % 2 == 0 else "float32") for n, one in enumerate(STEPPED)]
    cases = [
        one
        for n, what in enumerate(wanted)
        for one in (
            asked(*what, f"{n}whole", True),
            asked(*what, f"{n}parts", True, **parts),
            asked(*what, f"{n}whole", False, **parts),
            asked(*what, f"{n}parts", False),
        )
    ]
    for one in cases:
        Path(one["checkpoint"]).mkdir(exist_ok=True)
    for report in run_ranks("spmd.training_ranks", 2, {"cases": cases, "paths": paths}):
        found = report["cases"]
        for n, what in enumerate(wanted):
            whole, *others = found[4 * n : 4 * n + 4]
            assert whole["parts"] < others[0]["parts"] > 3, what
            for other in others:
                assert other["steps"] == whole["steps"] and other["sums"] == whole["sums"], what
