import json
import random

import pytest

from spmd_rl.data.samples import sample_record, write_samples
from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.rewards.audit import main, read_samples, score
from spmd_rl.rewards.grading.pool import GraderPool
from spmd_rl.rewards.reward_sample import of_tokens

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


@pytest.mark.long
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


@pytest.mark.long
def test_the_same_response_has_the_same_grade_where_it_is_made_and_in_an_audit(tmp_path):
    rules = {"math_answer": 1.0, "format": 0.5, "strict_format": 0.2, "base_acc": 0.3, "repetition(ngram=3)": 0.1}
    draw = random.Random(7)
    forms = ("<think>why</think> <answer>\\boxed{%s}</answer>", "because</think><answer>%s</answer>", "\\boxed{%s}")
    forms += (
        "The answer is **%s**, since it is.",
        "%s",
        "so \\frac{\\sqrt{3}}{%s}",
        "a b c a b c a b c %s",
        "",
        "(2, %s)",
    )
    with GraderPool(rules) as pool:
        made = {}
        for number in range(300):
            prompt = Prompt(number, (1, 2), "What is 3+4?", "7", {"level": number})
            rendered = "<user>What is 3+4?<assistant>" + draw.choice(["", "<think>\n"])
            form = draw.choice(forms)
            text = form % draw.choice(["7", "7.0", "8", "\\frac{14}{2}"]) if "%s" in form else form
            ids, reason = [draw.randrange(5) for _ in text.split()], draw.choice(["stop", "length"])
            made[number] = of_tokens(prompt, rendered, text, ids, reason, 64)
            pool.submit(number, made[number])
        scored = {one.id: one for one in pool.collect(block=True)}
    kept = [
        sample_record(scored[n], one.row, step=1, question=one.prompt, prompt=one.rendered, answer=one.answer)
        | {"response": one.response, "finish_reason": one.finish_reason, "response_tokens": one.tokens}
        | {"response_ids": one.response_ids}
        for n, one in made.items()
    ]
    write_samples(tmp_path / "samples" / "step_000001.jsonl", kept)
    stored, skipped = read_samples(tmp_path, 64)
    again = score(stored, rules, 1, 10.0)
    assert len(again) == 300 and not skipped and len({one.cause for one in again}) >= 3
    for one, old in zip(again, scored.values(), strict=True):
        assert (one.reward, one.cause, one.scores) == (old.reward, old.cause, old.scores)
