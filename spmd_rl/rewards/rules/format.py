"""Rules about the shape of a response: it thinks first and answers then, in tags; it goes step by step."""

import re

from spmd_rl.rewards.grade import RewardSample

_TAG = re.compile(r"</?(?:think|answer)>")
_SHAPE = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
_STRICT = re.compile(r"<think>.*</think>.*<answer>.*\\boxed\{.*\}.*</answer>", re.DOTALL)
_THINK_BOXED = re.compile(r"\s*<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)
_BOX = re.compile(r"\\boxed\{.*?\}")
# Steps that are numbered, listed, or joined by words that order them.
_STEP = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,")
_STEPS = 3


def format_tags(sample: RewardSample) -> float:
    """1.0 for `<think>...</think> <answer>...</answer>` and nothing around it, else 0.0
    (format reward of DeepSeek-R1, https://arxiv.org/abs/2501.12948, section 2.2.2).

    Each tag occurs exactly once, so that a model can't earn it with several answers. Where the chat template itself
    opens `<think>` at the end of the prompt, the response goes on from there.
    """
    response = sample.opened_response
    return float(len(_TAG.findall(response)) == 4 and _SHAPE.fullmatch(response) is not None)


def strict_format(sample: RewardSample) -> float:
    """1.0 when the response starts with `<think>`, ends with `</answer>`, has each of the four tags and one \\boxed{}
    exactly once and in the order think, answer, box; else -0.5."""
    response = sample.opened_response
    once = len(_TAG.findall(response)) == 4 and len(_BOX.findall(response)) == 1
    return 1.0 if once and _STRICT.fullmatch(response) else -0.5


def think_boxed(sample: RewardSample) -> float:
    """1.0 for a response that is `<think>...</think>` and then an answer in \\boxed{}, else 0.0."""
    return float(_THINK_BOXED.fullmatch(sample.opened_response) is not None)


def step(sample: RewardSample) -> float:
    """A third for each sign of going step by step, at most 1.0: "Step 1:", a response that begins "1.", lines that
    begin with - or *, "First,", "Second,", "Next,", "Finally,"."""
    return min(1.0, len(_STEP.findall(sample.response)) / _STEPS)
