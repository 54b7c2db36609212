"""Call reward functions that are written for TRL or verl as rules: `trl:file.py:function`, `verl:file.py:function`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmd_rl.rewards.grade import Grade, RewardSample

Function = Callable[..., Any]
"""Of a user's; what it takes and returns is looked at when it is called."""
_NOT_COLUMNS = ("prompt", "completion", "completion_ids", "prompts", "completions")


def from_trl(function: Function) -> Function:
    """Return a rule for lists of samples that calls a function as TRL does: prompts, completions, columns by name.

    Texts, or lists of messages where the data set's column `prompt` holds conversations. `completion_ids` and `answer`
    come with the columns.
    """

    def arguments(samples: Sequence[RewardSample], options: Mapping[str, object]) -> dict[str, object]:
        chat = [isinstance(sample.row.get("prompt"), list) for sample in samples]
        given: dict[str, object] = {
            "prompts": [s.row["prompt"] if c else s.prompt for s, c in zip(samples, chat, strict=True)],
            "completions": [
                [{"role": "assistant", "content": s.response}] if c else s.response
                for s, c in zip(samples, chat, strict=True)
            ],
            "completion_ids": [sample.response_ids for sample in samples],
            "answer": [sample.answer for sample in samples],
        }
        columns = dict.fromkeys(name for sample in samples for name in sample.row if name not in _NOT_COLUMNS)
        given |= {name: [sample.row.get(name) for sample in samples] for name in columns}
        return _accepted(function, given) | dict(options)

    if inspect.iscoroutinefunction(function):

        async def ask(samples: list[RewardSample], **options: object) -> object:
            return list(await function(**arguments(samples, options)))

        return _of_module(ask, function)

    def judge(samples: list[RewardSample], **options: object) -> object:
        return list(function(**arguments(samples, options)))

    return _of_module(judge, function)


def from_verl(function: Function) -> Function:
    """Return a rule that calls a function as verl does: data_source, solution_str, ground_truth, extra_info.

    One whose parameters are solution_strs and so on is given lists. Of a dictionary that it returns, score counts; acc
    says whether the answer is right, pred what it is.
    """
    if "solution_strs" in _parameters(function):

        def together(samples: list[RewardSample], **options: object) -> list[Grade | float | None]:
            parts = [_verl(sample) for sample in samples]
            given = {f"{name}s": [part[name] for part in parts] for name in parts[0]}
            return [_grade(value) for value in function(**_accepted(function, given), **options)]

        return _of_module(together, function)

    if inspect.iscoroutinefunction(function):

        async def ask(sample: RewardSample, **options: object) -> Grade | float | None:
            return _grade(await function(**_accepted(function, _verl(sample)), **options))

        return _of_module(ask, function)

    def judge(sample: RewardSample, **options: object) -> Grade | float | None:
        return _grade(function(**_accepted(function, _verl(sample)), **options))

    return _of_module(judge, function)


ADAPTERS: dict[str, Callable[[Function], Function]] = {"trl": from_trl, "verl": from_verl}


def _verl(sample: RewardSample) -> dict[str, object]:
    row = sample.row
    told = row.get("reward_model")
    truth = told.get("ground_truth") if isinstance(told, dict) else None
    return {
        "data_source": row.get("data_source"),
        "solution_str": sample.response,
        "ground_truth": sample.answer if truth is None else truth,
        "extra_info": row.get("extra_info"),
    }


def _grade(value: object) -> Grade | float | None:
    if not isinstance(value, dict):
        return value
    right, found = value.get("acc"), value.get("pred")
    cause = None if right is None else "correct" if right else "wrong"
    return Grade(value["score"], cause, None if found is None else str(found))


def _parameters(function: Function) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (ValueError, TypeError):
        return {}


def _accepted(function: Function, given: dict[str, object]) -> dict[str, object]:
    """Return the arguments that a function has parameters for; all, where it takes any."""
    parameters = _parameters(function)
    if not parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


def _of_module(rule: Function, function: Function) -> Function:
    """Give a rule its function's module, where its `prepare` is looked for, and its own `prepare`."""
    rule.__module__ = function.__module__
    if hasattr(function, "prepare"):
        rule.prepare = function.prepare  # type: ignore[attr-defined]
    return rule
