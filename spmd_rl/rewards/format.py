"""The response thinks first and answers then, in tags."""

import re

from spmd_rl.rewards.grade import RewardSample

_TAG = re.compile(r"</?(?:think|answer)>")
_SHAPE = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)


def format_tags(sample: RewardSample) -> float:
    """1.0 for `<think>...</think> <answer>...</answer>` and nothing around it, else 0.0
    (format reward of DeepSeek-R1, https://arxiv.org/abs/2501.12948, section 2.2.2).

    Each tag occurs exactly once, so that a model can't earn it with several answers. Where the chat template itself
    opens `<think>` at the end of the prompt, the response goes on from there.
    """
    response = sample.response
    if sample.prompt.rstrip().endswith("<think>"):
        response = "<think>" + response
    return float(len(_TAG.findall(response)) == 4 and _SHAPE.fullmatch(response) is not None)
