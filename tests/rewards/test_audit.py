import json

import pytest

from spmd_rl.rewards.audit import main, read_samples

RUN = [
    {"response": "So 7", "answer": "7", "reward": 1.0, "cause": "correct"},
    {"response": r"\boxed{8}", "answer": "7", "reward": 0.0, "cause": "wrong"},
    {"response": r"\boxed{\frac{14}{2}}", "answer": "7", "reward": 0.0, "cause": "wrong", "response_tokens": 9},
    {"response": "", "answer": "7", "reward": 0.0, "cause": "unparsed", "question": "3 + 4", "row": {"level": 2}},
]


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "one" / "samples"
    folder.mkdir(parents=True)
    for step, rows in ((2, RUN[2:]), (10, RUN[:2])):
        lines = [json.dumps({"id": 0, "prompt": "q", "finish_reason": "stop", "scores": {}} | row) for row in rows]
        (folder / f"step_{step:06}.jsonl").write_text("\n".join(lines) + "\n")
    return folder.parent


def test_stored_rewards_that_the_rules_would_not_give_again_are_listed(run, capsys):
    (run / "config.yaml").write_text("model: {path: m}\nreward: {rules: {math_answer: 1.0}}\n")
    assert main([str(run), "--output", str(run / "apart.jsonl")]) == 1
    out = capsys.readouterr().out
    assert "4 samples of 2 steps" in out and "1 of 4 samples are judged differently" in out
    assert "step_000002.jsonl:1  step 2" in out and r"new       1 correct \frac{14}{2}" in out
    [apart] = [json.loads(line) for line in (run / "apart.jsonl").open()]
    assert apart["old"]["cause"] == "wrong" and apart["new"]["scores"] == {"math_answer": 1.0}


def test_two_sets_of_rules_are_compared(run, capsys):
    assert main([str(run), "--rules", "acc", "1", "--against", "math_17k_acc", "1"]) == 1
    out = capsys.readouterr().out
    assert "old: 1 math_17k_acc" in out and "new: 1 acc" in out
    assert "3 of 4 samples are judged differently" in out, "acc takes 0.5 for a wrong answer and 1 for none"
    assert main([str(run), "--rules", "acc_for_ppo", "1", "--against", "math_17k_acc", "1"]) == 0


def test_lines_that_hold_no_sample_are_counted_and_left_out(run, capsys):
    (run / "samples" / "step_000011.jsonl").write_bytes(b'{"response": 3}\nnot json \xff\n\n[1]\n')
    stored, skipped = read_samples(run)
    assert len(stored) == 4 and [one.step for one in stored] == [2, 2, 10, 10]
    assert skipped == {"not JSON": 1, "without response, answer, reward and cause": 2}


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["runs/none"], "runs/none: there is no such directory; name a run's directory, runs/<name>"),
        (["{run}"], "config.yaml: there is no such file to read the run's rules from; give some with --rules"),
        (["{run}", "--rules", "acc"], "--rules acc: expected rules with a weight each"),
        (["{run}", "--rules", "ac", "1"], "'ac' is not a rule that can be used"),
        (["{run}/samples", "--rules", "acc", "1"], "there are no samples in"),
    ],
)
def test_what_cannot_be_audited_is_said_in_one_message(run, capsys, arguments, words):
    assert main([argument.format(run=run) for argument in arguments]) == 2
    assert words in capsys.readouterr().err
