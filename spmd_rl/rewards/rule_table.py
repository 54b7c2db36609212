"""The reward rules by name, and the user's own by import path, with their options."""

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterable
from functools import partial

from spmd_rl.rewards.grade import Grade, RewardSample
from spmd_rl.rewards.rules.exact import exact
from spmd_rl.rewards.rules.format import format_tags, step, strict_format
from spmd_rl.rewards.rules.length import length, overlong, repetition
from spmd_rl.rewards.rules.math_answer import math_answer
from spmd_rl.rewards.rules.mindspeed import acc, acc_for_dapo, acc_for_ppo, base_acc, math_17k_acc, math_verify_reward

Rule = (
    Callable[[RewardSample], Grade | float]
    | Callable[[RewardSample], Awaitable[Grade | float]]
    | Callable[[list[RewardSample]], list[Grade | float]]
    | Callable[[list[RewardSample]], Awaitable[list[Grade | float]]]
)
"""A rule takes a sample, or a list of them where its parameter is called `samples`; it may be asynchronous."""

RULES: dict[str, Rule] = {
    "math_answer": math_answer,
    "format": format_tags,
    "exact": exact,
    "acc": acc,
    "base_acc": base_acc,
    "math_17k_acc": math_17k_acc,
    "acc_for_dapo": acc_for_dapo,
    "acc_for_ppo": acc_for_ppo,
    "math_verify_reward": math_verify_reward,
    "strict_format": strict_format,
    "step": step,
    "overlong": overlong,
    "length": length,
    "repetition": repetition,
}

_SPELLED = re.compile(r"(?P<rule>.*\S)\s*\((?P<options>[^()]*)\)\s*", re.DOTALL)


def resolve(name: str) -> Rule:
    """The rule called `name`: built in, or "path/to/file.py:function", or "package.module:function"; each may be
    followed by options, as in "overlong(buffer_tokens=512)".

    Raises a ValueError that names the rule, what was tried and the reason.
    """
    spelled = _SPELLED.fullmatch(name)
    if spelled is None:
        return _function(name)
    function = _function(spelled["rule"], name)
    options = _read_options(name, spelled["options"])
    _check_options(name, function, options)
    rule = partial(function, **options)
    if hasattr(function, "prepare"):
        rule.prepare = function.prepare
    return rule


def labels(names: Iterable[str]) -> dict[str, str]:
    """What to call rules in metrics: without path and options, unless that would make two the same."""
    names = list(names)
    bare = {name: m["rule"] if (m := _SPELLED.fullmatch(name)) else name for name in names}
    short = {name: rule.rpartition(":")[2] for name, rule in bare.items()}
    return {name: short[name] if list(short.values()).count(short[name]) == 1 else name for name in names}


def is_async(rule: Rule) -> bool:
    """It returns an awaitable."""
    function = rule.func if isinstance(rule, partial) else rule
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def is_batched(rule: Rule) -> bool:
    """It takes a list of samples: its parameter is called `samples`, or annotated as a list."""
    function = rule.func if isinstance(rule, partial) else rule
    try:
        first = next(iter(inspect.signature(function).parameters.values()))
    except (ValueError, TypeError, StopIteration):
        return False
    return first.name == "samples" or str(first.annotation).startswith(("list[", "typing.List["))


def _function(name: str, spelled: str | None = None) -> Rule:
    if name in RULES:
        return RULES[name]
    spelled = spelled or name
    source, colon, function = name.rpartition(":")
    if not colon or not source or not function:
        raise _unusable(
            spelled,
            "looked among the built-in rules",
            f"there are {', '.join(RULES)}; your own is path/to/file.py:function or package.module:function",
        )
    if source.endswith(".py"):
        path = os.path.abspath(source)
        tried = f"loaded the file {path}"
        if not os.path.isfile(path):
            raise _unusable(spelled, tried, "there is no such file")
        load = partial(_load_file, path)
    else:
        tried = f"imported the module {source}"
        load = partial(importlib.import_module, source)
    try:
        module = load()
    except (Exception, SystemExit) as error:
        raise _unusable(spelled, tried, f"{type(error).__name__}: {error}") from error
    rule = getattr(module, function, None)
    if not callable(rule):
        have = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise _unusable(spelled, tried, f"it has no function {function!r} (it has: {', '.join(have) or 'none'})")
    return rule


def _read_options(name: str, text: str) -> dict[str, int | float | bool | str]:
    options: dict[str, int | float | bool | str] = {}
    for option in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in option.partition("="))
        if not equals or not key.isidentifier():
            raise _unusable(name, "read its options", f"{option!r} is not name=value")
        options[key] = _read_value(value)
    return options


def _read_value(text: str) -> int | float | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _check_options(name: str, function: Rule, options: dict[str, int | float | bool | str]) -> None:
    tried = "read its options"
    parameters = dict(list(inspect.signature(function).parameters.items())[1:])
    for key, value in options.items():
        if key not in parameters:
            if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                continue
            raise _unusable(name, tried, f"it has no option {key!r} (it has: {', '.join(parameters) or 'none'})")
        wanted = parameters[key].annotation
        fits = {int: type(value) is int, float: type(value) in (int, float), bool: type(value) is bool}
        if not fits.get(wanted, True) or (wanted is str and not isinstance(value, str)):
            raise _unusable(name, tried, f"{key} = {value!r} should be of type {wanted.__name__}")
    try:
        getattr(function, "check", lambda **_: None)(**options)
    except ValueError as error:
        raise _unusable(name, tried, str(error)) from error


def _load_file(path: str):
    # A name of its own, not the bare stem: a rule file called json.py must not become everybody's json.
    module_name = "spmd_rl_rule_" + "".join(c if c.isalnum() else "_" for c in path)
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before it runs: dataclasses and pickling look there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


def _unusable(name: str, tried: str, reason: str) -> ValueError:
    return ValueError(f"reward.rules: {name!r} is not a rule that can be used; {tried}: {reason}")
