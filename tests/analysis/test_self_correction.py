"""Self-correction: what counts as it, in English and Chinese, what does not, and which is stronger."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.analysis.correction_markers import WEIGHTS, find_markers
from spmd_rl.analysis.self_correction import frequency, insight, ranked, thinking

CORRECTS = """
admits     | en | 12 + 3 = 14. That's wrong.
admits     | en | so it is 7. Hmm, this is not correct
admits     | en | I made an arithmetic mistake there.
admits     | en | Oops, 5
admits     | en | I misread it
admits     | en | That can't be right.
redoes     | en | Let me re-calculate.
redoes     | en | Let's recompute this
redoes     | en | Let me check again.
redoes     | en | on second thought, it is 5
redoes     | en | Let me try a different approach
redoes     | en | let me go back and reread the question
checks     | en | Let me check.
checks     | en | Let me double-check
checks     | en | Let us verify this
hesitates  | en | 12 + 3 = 14. Wait, 5
hesitates  | en | But wait, the tax is missing.
hesitates  | en | so it is 12, wait, no
hesitates  | en | wait a minute
hesitates  | en | Hmm, so 4?
hesitates  | en | Actually, it is 5
hesitates  | en | Hold on, 5
admits     | zh | 不对，应该是7
admits     | zh | 我之前的计算有误
admits     | zh | 等等，我算错了
redoes     | zh | 让我重新计算
redoes     | zh | 重新考虑这个问题
redoes     | zh | 再算一遍
redoes     | zh | 我们换个思路
checks     | zh | 检查一下结果
checks     | zh | 让我检查
hesitates  | zh | 答案是5。等等！
hesitates  | zh | 嗯，也许
"""
CASES = [tuple(part.strip() for part in line.split("|")) for line in CORRECTS.strip().splitlines()]
ORDINARY = """
Tom has to wait 5 minutes.
Waiting time is 5
Wait for the bus
Wait times are 5 and 7
She can't wait to see it. A waiter waits.
What actually happens is that x = 5
Let me rewrite the equation. Let me represent it by x. Let me recall. Let me reduce the fraction.
Let me read the question. Let me think step by step. Let me solve this.
He pays by check at the checkout.
This is correct. That is right.
He re-uses 5 bottles
苹果、香蕉等等。
2, 4, 6, 等等
将方程重新排列，重新整理得
让我来解这道题。让我们设x=5
两边不对称，不对应的角
小明等一下午的车，他等等就来
检查站要确认收货
""".strip().splitlines()


@pytest.mark.parametrize(("kind", "language", "text"), CASES)
def test_a_phrase_of_self_correction_is_found_with_its_kind_and_language(kind, language, text):
    found = find_markers(text)
    assert max(found, key=lambda marker: WEIGHTS[marker.kind]).kind == kind
    assert {marker.language for marker in found} == {language}
    assert all(text[marker.start : marker.end] == marker.text for marker in found)
    assert find_markers(text, languages=["zh" if language == "en" else "en"]) == []


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_uses_of_the_same_words_are_none(text):
    assert find_markers(text) == []


def test_what_quotes_the_prompt_does_not_count_and_the_models_own_words_do():
    prompt = 'Tom says: "Wait, let me check the   clock again." How long\nis it? 他说：等等，让我检查一下时间。'
    assert find_markers('The question: "Wait, let me check the clock again." So 5.', prompt) == []
    assert find_markers("他说：等等，让我检查一下时间。答案是5", prompt) == []
    [own] = find_markers("It is 5. Wait, 6 minutes.", prompt)
    assert own.text == "Wait"


@given(st.text(alphabet="ab WaitHm,.!?<think>/等不对重新算\n", max_size=200), st.text(max_size=30))
def test_markers_lie_in_the_text_in_order_and_never_overlap(text, prompt):
    found = find_markers(text, prompt)
    assert all(text[marker.start : marker.end] == marker.text for marker in found)
    assert all(one.end <= other.start for one, other in zip(found, found[1:], strict=False))


@pytest.mark.parametrize(
    ("response", "prompt", "inside"),
    [
        ("<think>a</think>b", "", ["a"]),
        ("x<think>a</think>b<think>c", "", ["a", "c"]),
        ("a</think>b", "", ["a"]),  # the template opened it
        ("a", "...<think>\n", ["a"]),
        ("a</think>b", "...<think>\n", ["a"]),
        ("a", "", []),
    ],
)
def test_thinking_lies_between_its_tags_which_the_prompt_may_open_and_the_limit_cut_off(response, prompt, inside):
    assert [response[start:end] for start, end in thinking(response, prompt)] == inside


def sample(response, cause="wrong", **others):
    return {"step": 3, "id": 7, "response": response, "prompt": "2 + 3?", "reward": 0.5, "cause": cause} | others


def test_only_thinking_is_searched_where_there_is_any_and_the_whole_response_otherwise():
    assert insight(sample("<think>2 + 3 is 5.</think> Wait, 5")) is None
    assert insight(sample("<think>Wait, 5</think>5")).inside_think
    assert not insight(sample("Wait, 5")).inside_think
    assert insight(sample("5")) is insight(sample("")) is None


def test_a_changed_answer_and_a_correct_one_make_a_sample_stronger():
    kept = insight(sample("<think>So the answer is 5. Wait, yes.</think>The answer is 5."))
    changed = insight(sample("<think>So the answer is 6. Wait, no.</think>The answer is 5."))
    solved = insight(sample("<think>So the answer is 6. Wait, no.</think>The answer is 5.", "correct"))
    assert not kept.changed and (changed.changed, changed.before, changed.after) == (True, "6", "5")
    assert [one.strength for one in ranked([kept, solved, changed])] == [5.0, 3.0, 1.0]
    # What the grader found is the final answer; 5,000.0 is 5000.
    known = insight(sample("<think>答案是5,000。等等，重新算。</think>所以", extracted="5000.0"))
    assert known.after == "5000.0" and not known.changed


def test_a_model_in_a_loop_has_no_more_insights_than_one_that_says_it_twice():
    twice, often = (insight(sample("Let me check again. " * times + "5")) for times in (2, 500))
    assert often.strength <= twice.strength + 1 and len(often.markers) <= 3


def test_the_excerpt_shows_the_strongest_marker_between_whole_words():
    one = insight(sample("word " * 100 + "Hmm. I made a mistake. " + "word " * 100))
    before, marker, after = one.excerpt
    assert marker == "I made a mistake"
    assert before.startswith("…word ") and after.endswith(" word…") and len(before) + len(after) < 300


def test_the_frequency_is_the_fraction_of_each_steps_samples():
    assert frequency([(2, True), (1, False), (2, False), (1, False)]) == {1: 0.0, 2: 0.5}
