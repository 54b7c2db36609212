"""Is the response's final answer mathematically equal to the gold answer? The one grader of answers."""

from spmd_rl.rewards.grade import Grade, RewardSample
from spmd_rl.rewards.math_equality.algebra import parse, parse_gold, prepare, verified
from spmd_rl.rewards.math_equality.equal import clean, equal
from spmd_rl.rewards.math_equality.extract import (
    PLACES,
    SEARCHED_CHARACTERS,
    THOUSANDS,
    boxes,
    find_answer,
    is_prose,
    pick,
    tidy,
)
from spmd_rl.rewards.math_equality.numbers import plain_number, read_number
from spmd_rl.rewards.math_equality.spans import western
from spmd_rl.rewards.math_equality.words import told


def math_answer(sample: RewardSample, extract: str = "boxed|answer:|answer is|final") -> Grade:
    """The rule: 1.0 when the response's final answer equals the gold answer, else 0.0.

    A response that the length limit cut off before it stated an answer is truncated rather than wrong; the number it
    happens to stop at still counts when it is right. `extract`: where the answer may stand, some of extract.PLACES.
    """
    return graded(sample, places_of(extract))


def graded(sample: RewardSample, places: tuple[str, ...] = PLACES, response: str | None = None) -> Grade:
    """A sample's Grade of 1.0 or 0.0, by the answer that stands in one of `places` of its (or another) response."""
    grade, stated = _judge(sample.answer, sample.opened_response if response is None else response, places)
    if sample.finish_reason == "length" and not stated and grade.cause != "correct":
        return Grade(0.0, "truncated", grade.extracted)
    return grade


def places_of(extract: str) -> tuple[str, ...]:
    """Read "boxed|final" as a tuple of PLACES, in their order; a ValueError names what is none of them."""
    names = [name.strip() for name in extract.split("|")]
    if unknown := [name for name in names if name not in PLACES]:
        raise ValueError(
            f"extract = {extract!r}: an answer is not looked for in {unknown[0]!r}; give some of {'|'.join(PLACES)}"
        )
    return tuple(place for place in PLACES if place in names)


def is_correct(gold: str, response: str, places: tuple[str, ...] = PLACES) -> Grade:
    """Grade of `response`: 1.0 correct, 0.0 wrong, or 0.0 unparsed when it holds no answer at all.

    The answer is the last \\boxed{}; else what follows the last "answer is", "Answer:" or "####"; else the last number
    or formula (`places` leaves some of these out). A "final answer is" after the box goes before it. Where a response
    has `</think>` or `<answer>`, only what follows the one and stands in the other counts.
    `gold` is a number (1,000 and 1000.0 are the same), LaTeX with or without delimiters, or a solution that ends in
    `#### N`. Raises a ValueError when it is empty.
    """
    return _judge(gold, response, places)[0]


def _judge(gold: str, response: str, places: tuple[str, ...]) -> tuple[Grade, bool]:
    """The grade, and whether the response stated an answer (rather than one being guessed)."""
    gold = tidy(THOUSANDS.sub(",", western(gold.rpartition("####")[2])))
    if not gold:
        raise ValueError("the gold answer is empty, so nothing can equal it; drop the row or give it an answer")
    number = plain_number(gold)
    if number is None and "boxed" in gold:
        box, joined, _ = boxes(gold)
        gold = joined or box or gold
    numeric = number is not None or read_number(gold) is not None
    found = find_answer(response, numeric, places)
    if found.text is None:
        return Grade(0.0, "unparsed"), False
    answer = plain_number(found.text) if number is not None else None
    if found.text == gold:
        same = True
    elif number is not None and answer is not None and "/" not in gold:
        same = number == answer or ("." in gold + found.text and equal(gold, found.text))
    elif not (found.stated or numeric) and (verdict := told(clean(gold), found.text)) is not None:
        return Grade(float(verdict), "correct" if verdict else "wrong", found.text), False
    elif found.stated or numeric or not is_prose(found.text):
        same = equal(gold, found.text)
    else:
        same = False
    if not same and found.joined:
        same = equal(gold, found.joined)
    if not same and not found.stated and not numeric:
        if found.joined and any(equal(gold, item) for item in found.joined.split(" or ")):
            return Grade(0.0, "wrong", found.joined), False  # one of several
        formula = pick(found.text[-SEARCHED_CHARACTERS:], last=True)
        if formula is not None and equal(gold, tidy(formula)):
            return Grade(1.0, "correct", tidy(formula)), False
        # The whole response, in which math-verify searches a formula.
        parsed = parse(found.text)
        if not parsed:
            return Grade(0.0, "unparsed"), False
        same = verified(parse_gold(gold), parsed)
        return Grade(float(same), "correct" if same else "wrong", str(parsed[-1])), False
    return Grade(float(same), "correct" if same else "wrong", found.text), found.stated


math_answer.prepare = prepare
math_answer.check = lambda extract="final": places_of(extract)
