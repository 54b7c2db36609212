import json
import sys

from tools import bench_algorithms


def test_the_table_has_the_means_over_seeds_and_what_was_gained_by_the_worst_and_the_best(
    tmp_path, monkeypatch, capsys
):
    for seed, after in ((1, 0.75), (2, 0.5)):
        run = tmp_path / f"rloo_{seed}"
        (run / "hf").mkdir(parents=True)
        rows = [
            {"eval/sums/accuracy": 0.25},
            {"timing/all": 90.0},
            {"timing/all": 150.0},
            {"eval/sums/accuracy": after},
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["x", "rloo.yaml", "--seeds", "1", "2", "--output", str(tmp_path), "--", "--train.steps", "3"]
    monkeypatch.setattr(sys, "argv", words)
    bench_algorithms.main()
    assert capsys.readouterr().out.splitlines()[-1] == "| `rloo.yaml` | 25 % | 62 % | +25 to +50 | 4 | 2 |"
