"""Lines of samples/: what they hold, and that they come back."""

import json
import math

import numpy
import pytest

from spmd_rl.data.samples import read_samples, sample_record, samples_file, write_samples
from spmd_rl.data.tickets import SampleReward

SCORED = SampleReward(3, 1.0, "correct", {"math_answer": 1.0}, "5")


def test_columns_that_json_cannot_spell_are_left_out_and_the_others_stay(tmp_path):
    row = {"n": numpy.int64(3), "list": numpy.array([1, 2]), "image": b"\xff", "nan": math.nan, "deep": {"a": [None]}}
    line = sample_record(SCORED, row, step=1, response="2 + 3 = 5")
    assert line["row"] == {"n": 3, "list": [1, 2], "deep": {"a": [None]}}
    assert line["extracted"] == "5" and line["cause"] == "correct" and line["id"] == 3
    assert "extracted" not in sample_record(SampleReward(3, 0.0, "wrong", {}), {}, step=1)


def test_samples_of_all_ranks_come_back_by_step_and_a_line_being_written_waits(tmp_path):
    hostile = "\ud800 line\u2028\u0085 end\n等等"
    folder = tmp_path / "samples"
    write_samples(folder / samples_file(2, rank=1), [{"step": 2, "response": hostile}])
    write_samples(folder / samples_file(2, rank=0), [{"step": 2, "response": "0"}])
    write_samples(folder / samples_file(1), [{"response": "without a step"}])
    with open(folder / samples_file(3), "w") as file:
        file.write('{"step": 3, "resp')
    assert list(read_samples(tmp_path)) == [
        {"step": 1, "response": "without a step"},
        {"step": 2, "response": "0"},
        {"step": 2, "response": hostile},
    ]


def test_no_samples_and_broken_ones_are_named(tmp_path):
    with pytest.raises(ValueError, match="samples has no step_.*run.samples_logged"):
        list(read_samples(tmp_path))
    (tmp_path / "samples").mkdir()
    for text in ("{\n", "[1]\n", json.dumps({"step": 1}) + "\n"):
        (tmp_path / "samples" / "step_000001.jsonl").write_text(text)
        with pytest.raises(ValueError, match="step_000001.jsonl, line 1"):
            list(read_samples(tmp_path))
