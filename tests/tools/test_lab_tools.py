"""Test what students hand in, as the commands give it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AHA = "<think>So the answer is 6. Wait, that is wrong. Let me recompute.</think>The answer is 5."


def tool(name: str, *arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "tools" / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of three steps, one with 8 and one with 4 samples a prompt, and one directory that is none."""
    root = tmp_path_factory.mktemp("runs")
    for name, size in (("wide", 8), ("narrow", 4)):
        (root / name / "samples").mkdir(parents=True)
        (root / name / "config.yaml").write_text(f"algorithm:\n  samples_per_prompt: {size}\n")
        rows = [{"step": n, "grpo/rewards/mean": n / 4, "timing/all": 2.0, "timing/update": 1.0} for n in (1, 2, 3)]
        (root / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for n in (1, 2):
        samples = [
            {"step": n, "id": 0, "prompt": "2+3?", "response": "5", "reward": 1.0, "cause": "correct"},
            {
                "step": n,
                "id": 1,
                "prompt": "2+3?",
                "response": AHA,
                "reward": n / 2,
                "cause": ["wrong", "correct"][n - 1],
            },
        ]
        text = "".join(json.dumps(sample) + "\n" for sample in samples[: n + 1][-n:])
        (root / "wide" / "samples" / f"step_{n:06d}.jsonl").write_text(text)
    (root / "empty").mkdir()
    return root


@pytest.mark.long
def test_plot_run_writes_pictures_and_a_page_of_one_run_or_several(runs, tmp_path):
    done = tool("plot_run", runs / "wide", runs / "narrow", "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"overview.png", "reward.png", "time.png", "self_correction.png", "report.md"}
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| `algorithm.samples_per_prompt` | 8 | 4 |" in page
    assert "not measured in narrow: Written samples with a marker of self-correction" in done.stdout
    assert "## Samples of wide" in page and "Step 2, correct, reward 1" in page


def test_plot_run_in_a_terminal_names_several_runs_and_leaves_no_files(runs):
    done = tool("plot_run", runs / "wide", runs / "narrow", "--text")
    assert done.returncode == 0, done.stderr
    assert "wide: samples_per_prompt=8" in done.stdout and done.stdout.count("reward: 0.25 -> 0.75") == 2
    assert not (runs / "wide" / "report").exists()


@pytest.mark.long
def test_several_runs_leave_the_report_of_the_first_alone_and_a_paper_gets_a_pdf(runs):
    done = tool("plot_run", runs / "wide", runs / "narrow", "--format", "pdf")
    assert done.returncode == 0, done.stderr
    assert not (runs / "wide" / "report").exists()
    assert (runs / "comparisons" / "wide_narrow" / "overview.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.long
def test_find_insights_ranks_and_counts(runs):
    done = tool("find_insights", runs / "wide")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.index("step 2  sample 1"), done.stdout.index("step 1  sample 1")
    assert first < second and "answer 6 -> 5" in done.stdout and ">>that is wrong<<" in done.stdout
    assert "2 of 3 written samples in 2 steps correct themselves: 2 inside <think>" in done.stdout
    assert "fraction of a step's written samples: 1 -> 0.5" in done.stdout
    one = [json.loads(line) for line in tool("find_insights", runs / "wide", "--json", "--top", 1).stdout.splitlines()]
    assert [found["strength"] for found in one] == [10.0] and one[0]["changed"]
    chinese = tool("find_insights", runs / "wide", "--language", "zh")
    assert chinese.returncode == 0 and chinese.stdout.startswith("0 of 3 written samples")


def test_what_is_missing_is_said_without_a_traceback(runs):
    for done, said in (
        (tool("plot_run", runs / "empty"), "metrics.jsonl does not exist"),
        (tool("find_insights", runs / "narrow"), "run.samples_logged"),
        (tool("find_insights", runs / "narrow", "--top", -1), "--top -1"),
    ):
        assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
