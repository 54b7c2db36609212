"""The reward rules by name, and the user's own by import path."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import partial

from spmd_rl.rewards.exact import exact
from spmd_rl.rewards.format import format_tags
from spmd_rl.rewards.grade import Grade, RewardSample
from spmd_rl.rewards.math_answer import math_answer

Rule = Callable[[RewardSample], Grade | float]

RULES: dict[str, Rule] = {"math_answer": math_answer, "format": format_tags, "exact": exact}


def resolve(name: str) -> Rule:
    """The rule called `name`: built in, or "path/to/file.py:function", or "package.module:function".

    Raises a ValueError that names the rule, what was tried and the reason.
    """
    if name in RULES:
        return RULES[name]
    source, colon, function = name.rpartition(":")
    if not colon or not source or not function:
        raise _unusable(
            name,
            "looked among the built-in rules",
            f"there are {', '.join(RULES)}; your own is path/to/file.py:function or package.module:function",
        )
    if source.endswith(".py"):
        path = os.path.abspath(source)
        tried = f"loaded the file {path}"
        if not os.path.isfile(path):
            raise _unusable(name, tried, "there is no such file")
        load = partial(_load_file, path)
    else:
        tried = f"imported the module {source}"
        load = partial(importlib.import_module, source)
    try:
        module = load()
    except (Exception, SystemExit) as error:
        raise _unusable(name, tried, f"{type(error).__name__}: {error}") from error
    rule = getattr(module, function, None)
    if not callable(rule):
        have = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise _unusable(name, tried, f"it has no function {function!r} (it has: {', '.join(have) or 'none'})")
    return rule


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
