"""Texts without the secrets of the environment and of addresses: what is kept or shown of a run goes through here."""

import os
import re
from collections.abc import Mapping
from typing import Any, TypeVar

HIDDEN = "***"
_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
# Shorter ones are no secrets: true, 0, debug.
_SHORTEST = 8
_WHO = re.compile(r"(?<=://)[^/\s@?#'\"]+@")
_QUERY = re.compile(
    r"([?&;][\w.%-]*(?:token|key|secret|passw|pwd|signature|sig|auth|credential)[\w.%-]*=)[^&;#\s'\"]+", re.IGNORECASE
)

Value = TypeVar("Value")


def hidden(value: Value, environment: Mapping[str, str] = os.environ) -> Value:
    """The same text, or mapping or list of texts, with `***` for each secret; everything else as it is.

    Secrets are the values of variables with KEY, TOKEN, SECRET, PASSW or CREDENTIAL in their name (of 8 characters or
    more, and no path that exists), names and passwords in addresses (//user:password@host), and parameters of addresses
    that are called like these (?token=...).
    """
    return _without(value, _secrets(environment))


def _secrets(environment: Mapping[str, str]) -> list[str]:
    found = {
        value.strip()
        for name, value in environment.items()
        if _NAME.search(name) and len(value.strip()) >= _SHORTEST and not os.path.exists(value)
    }
    return sorted(found, key=len, reverse=True)  # one may be a part of another


def _without(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        return _QUERY.sub(rf"\1{HIDDEN}", _WHO.sub(f"{HIDDEN}@", value)) if "://" in value else value
    if isinstance(value, dict):
        return {_without(name, secrets): _without(inner, secrets) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without(inner, secrets) for inner in value)
    return value


def hide_in(error: BaseException) -> None:
    """Take secrets out of what an error, its notes and its causes say."""
    secrets, seen = _secrets(os.environ), set()
    links: list[BaseException | None] = [error]
    while links:
        link = links.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        link.args = _without(link.args, secrets)
        if isinstance(link, OSError):  # it says these instead
            link.strerror, link.filename = _without(link.strerror, secrets), _without(link.filename, secrets)
        if getattr(link, "__notes__", None):
            link.__notes__ = _without(link.__notes__, secrets)
        links += [link.__cause__, link.__context__]
