import subprocess
import sys

import pytest

from tools import bench_algorithms


@pytest.fixture
def table(tmp_path, monkeypatch, capsys):
    """Return a function that runs the tool with runs that only say what they came to, and answers (made, printed)."""
    for name in ("rloo", "ppo"):
        (tmp_path / f"{name}.yaml").write_text(name)
    made = []

    def train(config, seed, ranks, directory, overrides):
        made.append((config.stem, seed))
        if (config.stem, seed) in broken:
            raise subprocess.CalledProcessError(1, "torchrun")
        after = {1: 0.75, 2: 0.5}[seed]
        return [
            {"eval/sums/accuracy": 0.25},
            {"timing/all": 90.0},
            {"timing/all": 150.0},
            {"eval/sums/accuracy": after},
        ]

    broken: set[tuple[str, int]] = set()
    monkeypatch.setattr(bench_algorithms, "train", train)

    def call(*words, failing=()):
        made.clear()
        broken.clear()
        broken.update(failing)
        configs = [str(tmp_path / f"{name}.yaml") for name in ("rloo", "ppo")]
        monkeypatch.setattr(
            sys, "argv", ["x", *configs, "--seeds", "1", "2", "--output", str(tmp_path / "out"), *words]
        )
        with pytest.raises(SystemExit) as ended:
            bench_algorithms.main()
        return list(made), capsys.readouterr().out.splitlines()[2:], ended.value.code

    return call


def test_the_table_has_the_means_over_seeds_and_what_was_gained_by_the_worst_and_the_best(table):
    made, printed, status = table("--", "--train.steps", "3")
    assert made == [("rloo", 1), ("ppo", 1), ("rloo", 2), ("ppo", 2)]
    assert printed == [f"| `{name}.yaml` | 25 % | 62 % | +25 to +50 | 4 | 2 |" for name in ("rloo", "ppo")]
    assert status == 0


def test_runs_are_made_as_many_as_are_asked_for_and_the_table_has_what_is_there(table):
    assert table("--runs", "1") == ([("rloo", 1)], ["| `rloo.yaml` | 25 % | 75 % | +50 to +50 | 4 | 1 |"], 0)
    made, printed, _ = table("--runs", "0")
    assert (made, len(printed)) == ([], 1)
    assert table()[0] == [("ppo", 1), ("rloo", 2), ("ppo", 2)]
    assert table()[0] == []


def test_a_run_that_fails_is_left_out_and_made_again_by_the_same_command(table):
    made, printed, status = table(failing=[("rloo", 1)])
    assert len(made) == 4
    assert printed[0] == "| `rloo.yaml` | 25 % | 50 % | +25 to +25 | 4 | 1 |"
    assert status == 1
    assert table()[0] == [("rloo", 1)]


def test_results_of_other_settings_do_not_count_and_a_line_that_was_cut_off_is_made_again(table, tmp_path):
    table("--runs", "2")
    (tmp_path / "rloo.yaml").write_text("another")
    assert table("--runs", "0")[1] == ["| `ppo.yaml` | 25 % | 75 % | +50 to +50 | 4 | 1 |"]
    results = tmp_path / "out" / "results.jsonl"
    results.write_text(results.read_text()[:-5])
    assert table("--runs", "2")[0] == [("rloo", 1), ("ppo", 1)]
    assert len(results.read_text().splitlines()) == 3


def test_results_are_kept_beside_the_page(table, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"{bench_algorithms.BEGIN}{bench_algorithms.END}")
    assert len(table("--page", str(page))[0]) == 4
    assert len((tmp_path / "page.jsonl").read_text().splitlines()) == 4 and not (tmp_path / "out").exists()
    assert table("--page", str(page))[0] == []


def test_the_table_of_so_far_is_in_a_page_after_each_run(table, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"above\n{bench_algorithms.BEGIN}old\n{bench_algorithms.END}below\n")
    seen, train = [], bench_algorithms.train
    monkeypatch.setattr(bench_algorithms, "train", lambda *call: seen.append(page.read_text()) or train(*call))
    _, printed, _ = table("--page", str(page))
    assert [text.count("yaml") for text in seen] == [0, 1, 2, 2], "rows are of configs"
    before, _, rest = page.read_text().partition(bench_algorithms.BEGIN)
    assert before == "above\n" and rest.endswith(f"{bench_algorithms.END}below\n")
    assert "old" not in rest and rest.splitlines()[3:5] == printed


def test_a_page_without_a_place_for_the_table_is_refused(tmp_path):
    (tmp_path / "page.md").write_text("nothing")
    with pytest.raises(ValueError, match="--page = .*page.md: it has no lines <!-- table: tools/bench_algorithms.py"):
        bench_algorithms.put_into(tmp_path / "page.md", "")
    assert (tmp_path / "page.md").read_text() == "nothing"


def test_a_short_run_has_a_quarter_of_the_samples_of_its_config_and_is_none_of_the_whole_ones(table, tmp_path):
    for name in ("rloo", "ppo"):
        text = "model: {path: somewhere}\ntrain: {steps: 11, prompts_per_step: 12}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    words = bench_algorithms.halved(tmp_path / "ppo.yaml")
    assert words[:4] == ["--train.steps", "6", "--train.prompts_per_step", "6"]
    assert "--data.eval_problems" in words
    table("--runs", "1")
    assert table("--short", "--runs", "0")[1] == []
    assert table("--short", "--runs", "1")[0] == [("rloo", 1)]
    assert len(table("--runs", "0")[1]) == 1
