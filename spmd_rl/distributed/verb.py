"""The mark of what all ranks do, and how one rank does it: the signature of a verb's method is what travels."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar, get_type_hints

import msgspec

Method = TypeVar("Method", bound=Callable[..., Any])


def verb(method: Method) -> Method:
    """Mark a collective act: of Ranks, as rank 0 has it done, and of a worker's component, as every rank does it."""
    setattr(method, "is_verb", True)  # noqa: B010 (a function has no such attribute, as types go)
    return method


def verbs_of(component: object) -> dict[str, Callable[..., Any]]:
    """Return the methods of a component that are verbs, by name."""
    names = (name for name in dir(type(component)) if getattr(getattr(type(component), name), "is_verb", False))
    return {name: getattr(component, name) for name in names}


def do(method: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call a verb's method with arguments as they come from msgpack, each made what the signature says it is.

    Raises msgspec.ValidationError where one is missing, too much, or of another type.
    """
    function = method.__func__  # type: ignore[attr-defined]
    return method(**msgspec.structs.asdict(msgspec.convert(arguments, _arguments(function))))


@cache
def _arguments(function: Callable[..., Any]) -> type[msgspec.Struct]:
    hints = get_type_hints(function)
    _, *parameters = inspect.signature(function).parameters.values()
    fields = [
        (one.name, hints[one.name]) if one.default is one.empty else (one.name, hints[one.name], one.default)
        for one in parameters
    ]
    return msgspec.defstruct(function.__name__, fields, forbid_unknown_fields=True)
