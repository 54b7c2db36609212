"""The one place where samples are made for rules: of a response's tokens, of an answer in words, of a kept line."""

from collections.abc import Mapping, Sequence
from typing import Any

from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.rewards.grade import RewardSample


def of_tokens(
    prompt: Prompt, rendered: str, response: str, response_ids: Sequence[int], finish_reason: str, limit: int
) -> RewardSample:
    """Return what rules see of a response; `rendered`: the prompt as the model was shown it."""
    ids = list(response_ids)
    return _sample(prompt, prompt.answer, rendered, response, limit, finish_reason, response_ids=ids, tokens=len(ids))


def of_answer(prompt: Prompt, rendered: str, response: str, gold: str | None = None, limit: int = 2) -> RewardSample:
    """Return what rules see of words that nobody generated; `gold`: in place of the prompt's answer."""
    return _sample(prompt, prompt.answer if gold is None else gold, rendered, response, limit)


def of_record(row: Mapping[str, Any], limit: int) -> RewardSample:
    """Return what rules saw of a sample that a run has kept; KeyError or TypeError: it lacks what a sample has."""
    shown = str(row.get("prompt", ""))
    return RewardSample(
        prompt=str(row.get("question", shown)),
        rendered=shown,
        response=row["response"],
        answer=str(row["answer"]),
        finish_reason=row.get("finish_reason", "stop"),
        row=row.get("row") or {},
        prompt_ids=row.get("prompt_ids") or [],
        response_ids=row.get("response_ids") or [],
        response_tokens=int(row.get("response_tokens") or 0),
        response_limit=int(row.get("response_limit") or limit),
    )


def _sample(
    prompt: Prompt,
    answer: str,
    rendered: str,
    response: str,
    limit: int,
    finish_reason: str = "stop",
    response_ids: Sequence[int] = (),
    tokens: int = 1,
) -> RewardSample:
    return RewardSample(
        prompt=prompt.text,
        rendered=rendered,
        response=response,
        answer=answer,
        finish_reason=finish_reason,
        row=prompt.row,
        prompt_ids=list(prompt.token_ids),
        response_ids=list(response_ids),
        response_tokens=tokens,
        response_limit=limit,
    )
