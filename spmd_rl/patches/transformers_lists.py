"""Have transformers read once what it lists, and list what it looks for."""

import functools
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping


class OnDemand(Mapping[str, list[str]]):
    """Map a package to the distributions that have it; all are read only where one is not called as its distribution."""

    def __init__(self, read: Callable[[], Mapping[str, list[str]]]) -> None:
        self._read = functools.cache(read)

    def __getitem__(self, package: str) -> list[str]:
        try:
            return [importlib.metadata.distribution(package).metadata["Name"]]
        except importlib.metadata.PackageNotFoundError:
            return self._read()[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())


def list_on_demand(original: Callable[[], Mapping[str, list[str]]]) -> Callable[[], OnDemand]:
    """Return a mapping that is read when it must be."""

    @functools.wraps(original)
    def packages_distributions() -> OnDemand:
        return OnDemand(original)

    return packages_distributions


def keep_all(original: "functools._lru_cache_wrapper[object]") -> "functools._lru_cache_wrapper[object]":
    """Keep all that a function with a memory has returned."""
    return functools.lru_cache(maxsize=None)(original.__wrapped__)
