import json

import numpy as np
import pytest

from spmd_rl.analysis.compare_runs import compare, first_difference, largest_gap, rows

ROWS = [
    {"step": 1, "time": 1.0, "timing/all": 0.5, "grpo/rewards/mean": 0.5, "grad_norm": 1.0},
    {"step": 2, "time": 2.0, "timing/all": 0.4, "grpo/rewards/mean": 0.75, "grad_norm": None},
    {"step": 2, "time": 2.5, "eval/gsm8k/accuracy": 0.5},
]
WEIGHTS = {"embed": np.arange(6, dtype=np.float32).reshape(2, 3), "norm": np.ones(4, np.float32)}


def write_weights(file, tensors):
    header, offset = {}, 0
    for name, values in tensors.items():
        header[name] = {
            "dtype": "F32" if values.dtype == np.float32 else "BF16",
            "shape": list(values.shape),
            "data_offsets": [offset, offset + values.nbytes],
        }
        offset += values.nbytes
    text = json.dumps(header).encode()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(t.tobytes() for t in tensors.values()))


def write_run(run_dir, lines=ROWS, rewards=(0.0, 1.0), answer="12", weights=WEIGHTS, split_by_rank=True):
    """A run of two steps as runs write it, with two samples and one question of an evaluation."""
    (run_dir / "samples").mkdir(parents=True)
    (run_dir / "evaluations").mkdir()
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step in (1, 2):
        samples = [{"id": 10 * step + n, "response": "é", "reward": reward} for n, reward in enumerate(rewards)]
        names = (
            [f"step_{step:06d}_rank_{n:05d}.jsonl" for n in range(2)] if split_by_rank else [f"step_{step:06d}.jsonl"]
        )
        for n, name in enumerate(names):
            chosen = samples[n::2] if split_by_rank else samples
            (run_dir / "samples" / name).write_text("".join(json.dumps(one) + "\n" for one in chosen))
    question = {"index": 0, "answer": answer}
    (run_dir / "evaluations" / "step_000002_gsm8k.jsonl").write_text(json.dumps(question) + "\n")
    write_weights(run_dir / "hf" / "model.safetensors", weights)
    return run_dir


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "a")


def changed(row, **values):
    return [{**line, **(values if n == row else {})} for n, line in enumerate(ROWS)]


def test_the_same_run_is_the_same_and_what_was_compared_is_counted(run, tmp_path):
    other = write_run(tmp_path / "b", changed(1, time=9.0, **{"timing/all": 7.0, "restart/count": 1}))
    found = compare(run, other)
    assert found.difference is None
    assert str(found) == ("weights of 2 parameters, 4 samples, 1 answers of evaluations, 5 metrics of steps 1 to 2")
    assert largest_gap(run, other)[0] == 0.0


def test_samples_are_the_same_whichever_ranks_wrote_them(run, tmp_path):
    assert first_difference(run, write_run(tmp_path / "b", split_by_rank=False)) is None


@pytest.mark.parametrize(
    "difference, named",
    [
        (
            {"lines": changed(0, grad_norm=1.0000000000000002)},
            "metrics.jsonl, step 1: grad_norm is 1.0 and 1.0000000000000002",
        ),
        (
            {"lines": changed(2, **{"eval/gsm8k/accuracy": 0.25})},
            "metrics.jsonl, step 2: eval/gsm8k/accuracy is 0.5 and 0.25",
        ),
        ({"lines": changed(0, extra=1.0)}, "metrics.jsonl, step 1: extra is not there and 1.0"),
        ({"lines": ROWS[:1]}, "metrics.jsonl, step 2: 2 rows in one run, 0 in the other"),
        ({"rewards": (0.0, 0.5)}, "samples, step 1, step_000001_rank_00000.jsonl: reward of id 11 is 1.0 and 0.5"),
        ({"rewards": (0.0,)}, "samples, step 1: 2 lines in one run, 1 in the other"),
        ({"answer": "13"}, "evaluations, step 2, step_000002_gsm8k.jsonl: answer of index 0 is '12' and '13'"),
        (
            {"weights": WEIGHTS | {"embed": WEIGHTS["embed"] + np.eye(2, 3, dtype=np.float32)}},
            "hf/model.safetensors: parameter embed[0, 0] is 0.0 and 1.0",
        ),
        ({"weights": {"embed": WEIGHTS["embed"]}}, "hf: parameter norm is in one run alone"),
        (
            {"weights": WEIGHTS | {"norm": -np.zeros(4, np.float32)}},
            "hf/model.safetensors: parameter norm[0] is 1.0 and -0.0",
        ),
    ],
)  # fmt: skip
def test_the_first_difference_is_named_with_both_values(run, tmp_path, difference, named):
    other = write_run(tmp_path / "b", **difference)
    assert first_difference(run, other) == named


def test_the_earliest_step_comes_first_whatever_else_differs(run, tmp_path):
    other = write_run(tmp_path / "b", changed(1, grad_norm=3.0), answer="13", weights={})
    assert first_difference(run, other) == "metrics.jsonl, step 2: grad_norm is None and 3.0"


def test_minus_zero_and_bfloat16_are_told_apart_by_their_bits(tmp_path):
    one = {"w": np.array([0x0000, 0x3F80], np.uint16)}
    other = {"w": np.array([0x8000, 0x3F80], np.uint16)}
    a, b = (write_run(tmp_path / name, weights=weights) for name, weights in (("a", one), ("b", other)))
    assert first_difference(a, b) == "hf/model.safetensors: parameter w[0] is 0.0 and -0.0"


def test_the_largest_gap_is_relative_and_named(run, tmp_path):
    other = write_run(tmp_path / "b", changed(0, grad_norm=1.25))
    gap, where = largest_gap(run, other)
    assert (gap, where) == (pytest.approx(0.2), "grad_norm of step 1")
    assert largest_gap(run, other, range(2, 3))[0] == 0.0


def test_without_exported_weights_the_newest_checkpoints_files_decide(tmp_path):
    runs = [write_run(tmp_path / name, weights={}) for name in "ab"]
    for run in runs:
        for file in (run / "hf").iterdir():
            file.unlink()
    assert first_difference(*runs).startswith("neither hf/ nor checkpoints are there in both runs")
    for run, digest in zip(runs, ("aa", "bb"), strict=True):
        saved = run / "checkpoints" / "step_000002"
        saved.mkdir(parents=True)
        (saved / "files.json").write_text(json.dumps({"training/__0_0.distcp": {"bytes": 1, "digest": digest}}))
    assert "checkpoints/step_000002/training/__0_0.distcp: other bytes" in first_difference(*runs)


def test_rows_leave_out_what_clocks_and_meters_say(run):
    assert rows(run)[0] == {"step": 1, "grpo/rewards/mean": 0.5, "grad_norm": 1.0}
