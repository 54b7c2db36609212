"""Functions that a setting names: one of a table, or the user's own by import path, each with options."""

import ast
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from spmd_rl.errors import ConfigError, Problem, refuse

Function = TypeVar("Function", bound=Callable[..., Any])
Option = int | float | bool | str

_SPELLED = re.compile(r"(?P<function>.*\S)\s*\((?P<options>[^()]*)\)\s*", re.DOTALL)


@dataclass(frozen=True)
class FunctionTable(Generic[Function]):
    """Hold the functions that may stand for a setting."""

    knob: str
    noun: str
    """Name of one of them in messages."""
    functions: Mapping[str, Function | str]
    """By name; text is "package.module:function", imported when it is asked for."""
    arguments: int
    """Number that the program gives; the parameters after them are options."""
    adapters: Mapping[str, Callable[[Function], Function]] = field(default_factory=dict)
    """By what stands before a name, as in trl:file.py:function: makes a function of another program's signature one of
    ours."""

    def find(self, name: str, **settings: Any) -> Function:
        """Return the function called `name`: one of the table, or "path/to/file.py:function", or
        "package.module:function"; each may be followed by options, as in "overlong(buffer_tokens=512)".

        `settings`: values for those of its parameters that have these names and are not among the options.
        Raises a ConfigError that says the knob, the name, what was tried and the reason.
        """
        spelled = _SPELLED.fullmatch(name)
        function = self._function(spelled["function"] if spelled else name, name)
        options = self._read_options(name, spelled["options"]) if spelled else {}
        if options:
            self._check_options(name, function, options)
        if settings:
            options = {key: settings[key] for key in settings.keys() & _parameters(function)} | options
        if not options and not spelled:
            return function
        chosen = partial(function, **options)
        if hasattr(function, "prepare"):  # what a rule computes once, before processes are forked
            chosen.prepare = function.prepare  # type: ignore[attr-defined]
        return cast(Function, chosen)

    def parameters(self, name: str) -> set[str]:
        """Return the names of the parameters of the function called `name`."""
        return set(_parameters(self.find(name)))

    def unknown(self, name: str) -> Sequence[Problem]:
        """Return what is wrong with a name that is neither in the table nor a path; nothing is imported."""
        spelled = _SPELLED.fullmatch(name)
        bare = spelled["function"] if spelled else name
        if bare in self.functions or all(bare.rpartition(":")):
            return ()
        way = "your own is path/to/file.py:function or package.module:function"
        tried = f"looked among the built-in {self.noun}s"
        return self.unusable(name, tried, f"there are {', '.join(self.functions)}; {way}").problems

    def unusable(self, name: str, tried: str, reason: str) -> ConfigError:
        """Return the error that says why nothing can be done with `name`."""
        article = "an" if self.noun[0] in "aeiou" else "a"
        met = f"{name!r} is not {article} {self.noun} that can be used"
        return ConfigError(Problem(self.knob, None, met, f"{tried}: {reason}"))

    def _function(self, name: str, spelled: str) -> Function:
        adapter, colon, rest = name.partition(":")
        if colon and ":" in rest and adapter in self.adapters:
            return self.adapters[adapter](self._function(rest, spelled))
        if name in self.functions:
            found = self.functions[name]
            if not isinstance(found, str):
                return found
            name = found
        refuse(self.unknown(spelled))
        source, _, function = name.rpartition(":")
        if source.endswith(".py"):
            path = os.path.abspath(source)
            tried = f"loaded the file {path}"
            if not os.path.isfile(path):
                raise self.unusable(spelled, tried, "there is no such file")
            load: Callable[[], ModuleType] = partial(_load_file, path)
        else:
            tried = f"imported the module {source}"
            load = partial(importlib.import_module, source)
        try:
            module = load()
        except (Exception, SystemExit) as error:
            raise self.unusable(spelled, tried, f"{type(error).__name__}: {error}") from error
        own = getattr(module, function, None)
        if not callable(own):
            have = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
            reason = f"it has no function {function!r} (it has: {', '.join(have) or 'none'})"
            raise self.unusable(spelled, tried, reason)
        return cast(Function, own)

    def in_file(self, name: str) -> Sequence[Problem]:
        """Return what the file of a name such as path/to/file.py:function tells when it is read, and not run."""
        spelled = _SPELLED.fullmatch(name)
        source, _, function = (spelled["function"] if spelled else name).rpartition(":")
        adapter, _, rest = source.partition(":")
        path = os.path.abspath(rest if adapter in self.adapters else source)
        if not source or not function or not path.endswith(".py"):
            return ()
        tried = f"loaded the file {path}"
        if not os.path.isfile(path):
            return self.unusable(name, tried, "there is no such file").problems
        try:
            with open(path, "rb") as file:
                have = _top_names(ast.parse(file.read(), os.path.basename(path)))
        except (SyntaxError, ValueError, OSError) as error:
            return self.unusable(name, tried, f"{type(error).__name__}: {error}").problems
        if have is None or function in have:
            return ()
        public = sorted(name for name, defined in have.items() if defined and not name.startswith("_"))
        reason = f"it has no function {function!r} (it has: {', '.join(public) or 'none'})"
        return self.unusable(name, tried, reason).problems

    def _read_options(self, name: str, text: str) -> dict[str, Option]:
        options: dict[str, Option] = {}
        for option in filter(None, (part.strip() for part in text.split(","))):
            key, equals, value = (part.strip() for part in option.partition("="))
            if not equals or not key.isidentifier():
                raise self.unusable(name, "read its options", f"{option!r} is not name=value")
            options[key] = _read_value(value)
        return options

    def _check_options(self, name: str, function: Function, options: Mapping[str, Option]) -> None:
        tried = "read its options"
        parameters = dict(list(_parameters(function).items())[self.arguments :])
        for key, value in options.items():
            if key not in parameters:
                if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                    continue
                reason = f"it has no option {key!r} (it has: {', '.join(parameters) or 'none'})"
                raise self.unusable(name, tried, reason)
            wanted = parameters[key].annotation
            fits = {int: type(value) is int, float: type(value) in (int, float), bool: type(value) is bool}
            if not fits.get(wanted, True) or (wanted is str and not isinstance(value, str)):
                raise self.unusable(name, tried, f"{key} = {value!r} should be of type {wanted.__name__}")
        try:
            getattr(function, "check", lambda **_: None)(**options)
        except ValueError as error:
            raise self.unusable(name, tried, str(error)) from error


def labels(names: Iterable[str]) -> dict[str, str]:
    """Return what to call functions in metrics: without path and options, unless that would make two the same."""
    names = list(names)
    bare = {name: m["function"] if (m := _SPELLED.fullmatch(name)) else name for name in names}
    short = {name: function.rpartition(":")[2] for name, function in bare.items()}
    return {name: short[name] if list(short.values()).count(short[name]) == 1 else name for name in names}


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (ValueError, TypeError):  # some functions written in C have none that can be read
        return {}


def _read_value(text: str) -> Option:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _top_names(tree: ast.Module) -> dict[str, bool] | None:
    """Return the names that a file gives a value, and whether they are defined as functions; None: running it tells."""
    found: dict[str, bool] = {}
    todo: list[ast.AST] = list(tree.body)
    while todo:
        part = todo.pop()
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[part.name] = True
        elif isinstance(part, ast.alias):
            found[part.asname or part.name.partition(".")[0]] = False
        elif isinstance(part, ast.Name):
            found.setdefault(part.id, False)
            if part.id in ("globals", "exec", "setattr", "vars"):
                return None
        if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            todo += ast.iter_child_nodes(part)
    return None if {"*", "__getattr__"} & found.keys() else found


def _load_file(path: str) -> ModuleType:
    # A name of its own, not the bare stem: a user's file called json.py must not become everybody's json.
    module_name = "spmd_rl_user_" + "".join(c if c.isalnum() else "_" for c in path)
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before it runs: dataclasses and pickling look there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise
    return module
