"""From graded samples to numbers: votes, metrics, and a model against another."""

import pytest

from spmd_rl.data.sampling_params import SamplingParams
from spmd_rl.data.tickets import Ticket
from spmd_rl.evaluation import report
from spmd_rl.evaluation.benchmark import Benchmark, accuracy_interval, ask, compare, count_votes, measure
from spmd_rl.rewards.rules.math_answer import is_correct


def sample(cause, extracted=None, tokens=10, finish="stop"):
    return {
        "response": f"so {extracted}",
        "response_tokens": tokens,
        "finish_reason": finish,
        "cause": cause,
        "extracted": extracted,
    }


def line(*samples, index=0, answer="1/2"):
    right = sum(one["cause"] == "correct" for one in samples) / len(samples)
    return {"index": index, "question": f"q{index}", "answer": answer, "samples": list(samples), "accuracy": right}


def graders(pairs):
    """The real grader, asked as the ranks ask it."""
    return [is_correct(gold, f"\\boxed{{{other}}}").cause == "correct" for _, gold, other in pairs]


def with_votes(*lines):
    for one, votes in zip(lines, count_votes(lines, graders), strict=True):
        one["votes"] = votes
    return list(lines)


def test_answers_that_the_grader_calls_equal_are_one_kind():
    asked = line(
        sample("wrong", "0.25"),
        sample("correct", "0.5"),
        sample("wrong", "\\frac{1}{4}"),
        sample("correct", "\\frac12"),
        sample("wrong", "1/4"),
        sample("wrong", "7"),
        sample("unparsed"),
        sample("truncated", "3", finish="length"),
    )
    assert count_votes([asked], graders) == [
        [
            {"answer": "0.25", "count": 3, "correct": False},
            {"answer": "1/2", "count": 2, "correct": True},
            {"answer": "7", "count": 1, "correct": False},
        ]
    ]


def test_equal_spellings_need_no_grader_and_correct_answers_are_not_compared():
    asked = [line(sample("wrong", "7"), sample("wrong", " 7 "), sample("correct", "1/2")), line(sample("unparsed"))]

    def nobody(pairs):
        assert not pairs
        return []

    assert count_votes(asked, nobody) == [
        [{"answer": "7", "count": 2, "correct": False}, {"answer": "1/2", "count": 1, "correct": True}],
        [],
    ]


def test_a_rule_that_does_not_say_what_it_read_has_no_majority():
    asked = with_votes(line(sample("wrong", None), sample("correct", None)))
    assert asked[0]["votes"] is None
    assert not [name for name in measure(asked) if name.startswith("majority")]


def test_one_sample_a_question_gives_accuracy_lengths_and_fractions_only():
    asked = with_votes(
        line(sample("correct", "1/2", tokens=4)),
        line(sample("unparsed", tokens=8)),
        line(sample("truncated", tokens=30, finish="length")),
        line(sample("wrong", "3", tokens=6)),
    )
    assert measure(asked) == {
        "accuracy": 0.25,
        "unparsed_fraction": 0.25,
        "truncated_fraction": 0.25,
        "response_length_mean": 12.0,
    }
    assert accuracy_interval(asked) == pytest.approx((0.0456, 0.6994), abs=1e-4)


def test_several_samples_give_pass_and_majority_at_powers_of_two():
    asked = with_votes(
        line(sample("correct", "1/2"), sample("wrong", "7"), sample("wrong", "8"), sample("unparsed")),
        line(*[sample("correct", "1/2")] * 4),
    )
    found = measure(asked)
    assert [name for name in found if "_at_" in name] == [
        *("pass_at_1", "pass_at_2", "pass_at_4", "majority_at_1", "majority_at_2", "majority_at_4"),
    ]
    assert found["accuracy"] == found["pass_at_1"] == found["majority_at_1"] == 0.625
    assert found["pass_at_2"] == pytest.approx((0.5 + 1) / 2)
    assert found["pass_at_4"] == 1.0
    # Of two samples: with 7 or 8 a tie, with the silent one alone; of four a tie of three.
    assert found["majority_at_2"] == pytest.approx(((0.5 * 2 + 1) / 6 + 1) / 2)
    assert found["majority_at_4"] == pytest.approx((1 / 3 + 1) / 2)


def test_models_are_compared_question_by_question():
    right, wrong = sample("correct", "1/2"), sample("wrong", "3")
    old = [line(one, index=i) for i, one in enumerate((right, wrong, wrong, right, wrong))]
    new = [line(one, index=i) for i, one in enumerate((right, right, right, wrong, wrong))]
    found = compare(old, new)
    assert (len(found.wins), len(found.losses), found.ties) == (2, 1, 2)
    assert (found.baseline_accuracy, found.accuracy, found.p) == (0.4, 0.6, 1.0)
    assert [(one["index"], one["verdict"]) for one in found.changed()] == [(1, "won"), (2, "won"), (3, "lost")]
    assert found.changed()[0]["baseline_responses"] == ["so 3"] and found.changed()[0]["responses"] == ["so 1/2"]


def test_other_questions_are_not_compared():
    one, other = [line(sample("wrong", "3"), index=0)], [line(sample("wrong", "3"), index=1)]
    for new in (other, one + other):
        with pytest.raises(ValueError, match="baseline: it was asked 1 questions and this model"):
            compare(one, new)


class Heard:
    """Stands where ranks do: two samples of each question, of which the second is right."""

    def generate(self, split, rows, step, samples, sampling):
        self.asked = split, list(rows), step, samples
        return [Ticket(i, i // 2, 5, 10, 10, "stop") for i in range(2 * len(rows))], {}

    def rewards(self):
        return {}, {"timing/non_overlap_rule_reward": 0.5}

    def conversations(self, ids, step):
        asked = {"question": "q", "answer": "1/2", "prompt": "p", "prompt_tokens": 5, "row": {}}
        made = [sample("correct" if i % 2 else "wrong", str(i)) for i in ids]
        return [{"id": i, "index": 10 + i // 2} | asked | one for i, one in zip(ids, made, strict=True)]

    def compare_answers(self, split, pairs):
        return graders(pairs)

    def forget(self):
        self.forgot = True


def test_questions_come_back_in_order_with_their_samples():
    ranks = Heard()
    lines, waited = ask(ranks, Benchmark("b", "split", 3), 4, 2, SamplingParams(1.0, 10))
    assert ranks.asked == ("split", [0, 1, 2], 4, 2) and ranks.forgot and waited == 0.5
    assert [one["index"] for one in lines] == [10, 11, 12]
    assert [[made["extracted"] for made in one["samples"]] for one in lines] == [["0", "1"], ["2", "3"], ["4", "5"]]
    assert lines[0]["votes"] == [
        {"answer": "1/2", "count": 1, "correct": True},
        {"answer": "0", "count": 1, "correct": False},
    ]


def test_a_page_shows_the_questions_with_their_pictures_the_wrong_ones_first(tmp_path):
    lines = [
        {"question": f"<b>{n}", "answer": "1", "accuracy": float(n), "samples": [{"response": f"said {n}"}]}
        for n in (1, 0)
    ]
    assert report.write_page(tmp_path, "geo", lines) is None
    lines[0]["thumbnails"] = ["data:image/jpeg;base64,AAAA"]
    page = report.write_page(tmp_path, "geo", lines).read_text()
    assert page.index("said 0") < page.index("said 1") and page.count("<img") == 1 and "&lt;b&gt;1" in page
