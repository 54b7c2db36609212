"""Test what the soak calls a leak, and what it does not."""

import os
import random
import subprocess
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools import soak


def rows(resident=lambda step: 500.0, steps: int = 300, others=None) -> list[dict]:
    """A run of one rank; numbers by step, memory in MB."""
    level = {metric: lambda step: 5 for metric in soak.LABELS if metric != soak.MEMORY} | (others or {})
    return [
        {"step": step, soak.MEMORY: [resident(step) * 1e6]} | {metric: [at(step)] for metric, at in level.items()}
        for step in range(1, steps + 1)
    ]


@given(st.floats(-5, 5), st.floats(0, 1000), st.integers(3, 50))
def test_the_slope_of_a_straight_line_is_its_own_without_error(a_step, start, count):
    steps = list(range(100, 100 + count))
    found = soak.slope(steps, [start + a_step * step for step in steps])
    assert found.a_step == pytest.approx(a_step, abs=1e-8)
    assert found.error == pytest.approx(0.0, abs=1e-6)


def test_the_error_of_a_slope_is_that_of_the_textbook():
    # Four points about y = x: deviations 1, -1, -1, 1 and a spread of 5; sqrt(4 / 2 / 5).
    found = soak.slope([1, 2, 3, 4], [2, 1, 2, 5])
    assert (found.a_step, found.error) == (pytest.approx(1.0), pytest.approx((4 / 2 / 5) ** 0.5))


@pytest.mark.parametrize("seed", range(5))
def test_memory_that_leaks_is_called_a_leak_through_noise_and_flat_noise_is_not(seed):
    noise = random.Random(seed)
    noisy = [noise.gauss(500, 4) for _ in range(300)]
    assert soak.judge(rows(lambda step: noisy[step - 1]), 100, 0.1).leaks == []
    [leak] = soak.judge(rows(lambda step: noisy[step - 1] + 0.2 * step), 100, 0.1).leaks
    assert leak.startswith("rank 0 grows by 0.") and leak.endswith("MB a step; 0.1 is the limit")


def test_what_grows_while_the_run_warms_up_is_no_leak():
    assert soak.judge(rows(lambda step: 500 + min(step, 100)), 100, 0.1).leaks == []
    assert len(soak.judge(rows(lambda step: 500 + min(step, 100)), 20, 0.1).leaks) == 1


@pytest.mark.parametrize("metric", soak.COUNTS)
def test_one_more_every_fifty_steps_is_a_leak_and_what_comes_and_goes_is_none(metric):
    [leak] = soak.judge(rows(others={metric: lambda step: 5 + step // 50}), 100, 0.1).leaks
    assert leak.endswith(f"more {soak.COUNTS[metric]} at the end than at the beginning")
    assert soak.judge(rows(others={metric: lambda step: 6 if step % 20 < 3 else 5}), 100, 0.1).leaks == []


def test_every_rank_is_judged_and_a_run_that_is_too_short_is_not():
    two = rows()
    for row in two:
        for name, values in row.items():
            if name != "step":
                values.append(values[0] + (2e5 * row["step"] if name == soak.MEMORY else 0))
    assert [leak[:6] for leak in soak.judge(two, 100, 0.1).leaks] == ["rank 1"]
    with pytest.raises(ValueError, match="--warm-up 100: of 104 steps 4 are left"):
        soak.judge(rows(steps=104), 100, 0.1)


def test_what_a_run_leaves_is_named(tmp_path):
    temporary, run_dir, mark = tmp_path / "tmp", tmp_path / "run", uuid.uuid4().hex
    (run_dir / "checkpoints" / "step_000002.partial").mkdir(parents=True)
    for name in ("forgotten", "torchinductor_me", "torchelastic_x"):
        (temporary / name).mkdir(parents=True)
    before = set(os.listdir("/dev/shm"))
    shared = Path("/dev/shm") / f"spmd_rl_test_{mark}"
    shared.touch()
    process = subprocess.Popen(["sleep", "60"], env=os.environ | {"SPMD_RL_SOAK": mark})
    try:
        found = soak.left_over(mark, temporary, run_dir, before)
        with open(shared):  # of a program that still runs
            assert str(shared) not in soak.left_over(mark, temporary, run_dir, before)
    finally:
        process.kill()
        process.wait()
        shared.unlink()
    assert f"process {process.pid}: sleep 60" in found and str(shared) in found
    assert [Path(name).name for name in found[-2:]] == ["forgotten", "step_000002.partial"]
    assert not any("torch" in name for name in found)
