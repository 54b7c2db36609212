"""A wheel as it is downloaded: its Python files, its metadata, its operators' schemas."""

import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import IO

from tools.npu_contract.schema import Schema

_GLIBC = ("2_34", "2_31", "2_28", "2_24", "2_17")
_OPERATOR = re.compile(
    rb"(?<![\w:.])((?:_?npu_|get_npu_)[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)?\([^\x00\n]{0,6000}?\) -> [^\x00\n]{1,400}?)\x00"
)


class NoWheel(Exception):
    """A wheel is neither in the cache nor on the index."""


@dataclass
class Wheel:
    """One package of one version, opened where it lies."""

    package: str
    path: Path | IO[bytes]
    _file: zipfile.ZipFile = field(init=False)

    def __post_init__(self) -> None:
        self._file = zipfile.ZipFile(self.path)
        self.names = frozenset(self._file.namelist())
        self.text, self.bound, self.tree = cache(self._text), cache(self._bound), cache(self._tree)

    def _text(self, name: str) -> str:
        return self._file.read(name).decode("utf-8", "replace")

    def _tree(self, name: str) -> ast.Module:
        return ast.parse(self.text(name), name)

    def about(self, leaf: str) -> str:
        """Return a file of its .dist-info; "" where there is none."""
        found = [name for name in self.names if name.endswith(f".dist-info/{leaf}")]
        return self.text(found[0]) if found else ""

    @cached_property
    def library(self) -> bytes:
        """torch_npu's own library."""
        return self._file.read(next(name for name in self.names if name.endswith("/lib/libtorch_npu.so")))

    @cached_property
    def sources(self) -> str:
        """All Python files, one after another."""
        return "\n".join(self.text(name) for name in sorted(self.names) if name.endswith(".py"))

    @cached_property
    def operators(self) -> dict[str, list[Schema]]:
        """Name -> schemas of its overloads, as the libraries hold them."""
        found: dict[str, list[Schema]] = {}
        for name in self.names:
            if re.search(r"/lib/lib(torch_npu|op_plugin_atb)\.so$", name):
                for text in {match[1].decode() for match in _OPERATOR.finditer(self._file.read(name))}:
                    if (schema := Schema.parse(text)) is not None:
                        found.setdefault(schema.base, []).append(schema)
        return found

    def module(self, dotted: str) -> str | None:
        """Return the file of a module; None where the wheel has none."""
        base = dotted.replace(".", "/")
        return next((name for name in (f"{base}.py", f"{base}/__init__.py") if name in self.names), None)

    def resolves(self, dotted: str, name: str | None = None) -> bool:
        """Return whether a module, and a name in it, is there; what may be bound while it runs counts as there."""
        prefix = dotted.replace(".", "/")
        file = self.module(dotted)
        if file is None:
            compiled = any(one.startswith(f"{prefix}.") and one.endswith(".so") for one in self.names)
            package = any(one.startswith(f"{prefix}/") for one in self.names)
            return compiled or (package and (name is None or self.resolves(f"{dotted}.{name}")))
        if name is None:
            return True
        names, open_ended = self.bound(file)
        return name in names or open_ended or (self.module(dotted) is not None and self._below(dotted, name))

    def _below(self, dotted: str, name: str) -> bool:
        prefix = f"{dotted}.{name}".replace(".", "/")
        return any(one.startswith((f"{prefix}/", f"{prefix}.")) for one in self.names)

    def _bound(self, file: str) -> tuple[frozenset[str], bool]:
        """Return the names that a module binds, and whether there may be more."""
        names: set[str] = set()
        open_ended = False
        for node in _statements(self.tree(file).body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
                open_ended |= node.name == "__getattr__"
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    names.add(alias.asname or alias.name.split(".")[0])
                    if alias.name == "*" and isinstance(node, ast.ImportFrom):
                        source = self.module(_module_of(file, node))
                        if source is None or source == file:
                            open_ended = True
                        else:
                            more, others = self.bound(source)
                            names |= more
                            open_ended |= others and not self.exported(source)
            else:
                targets = getattr(node, "targets", [getattr(node, "target", None)])
                names |= {
                    one.id for target in targets if target for one in ast.walk(target) if isinstance(one, ast.Name)
                }
        return frozenset(names), open_ended

    def exported(self, file: str) -> set[str]:
        """Return what stands in a module's __all__."""
        found: set[str] = set()
        for node in ast.walk(self.tree(file)):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(one, ast.Name) and one.id == "__all__" for one in targets):
                value = getattr(node, "value", None)
                found |= {one.value for one in getattr(value, "elts", ()) if isinstance(one, ast.Constant)}
        return found

    def definition(self, file: str, qualified: str) -> ast.AST | None:
        """Return a class or function by its dotted name in a file; they nest."""
        body, found = self.tree(file).body, None
        for part in qualified.split("."):
            kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            found = next((node for node in _statements(body) if isinstance(node, kinds) and node.name == part), None)
            if found is None:
                return None
            body = found.body
        return found


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return statements of a block, and of the blocks in it that open no scope."""
    found = []
    for node in body:
        found.append(node)
        if isinstance(node, ast.If | ast.For | ast.While | ast.With | ast.Try):
            for part in ("body", "orelse", "finalbody"):
                found += _statements(getattr(node, part, []))
            found += [inner for handler in getattr(node, "handlers", ()) for inner in _statements(handler.body)]
    return found


def _module_of(file: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = file.split("/")[: -node.level]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _pip(verb: list[str], package: str, version: str, arch: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", *verb, f"{package}=={version}", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "311", "--implementation", "cp", "-q", "--retries", "1"]
    command += [word for one in _GLIBC for word in ("--platform", f"manylinux_{one}_{arch}")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def fetch(package: str, version: str, arch: str, place: Path) -> Wheel:
    """Return a wheel from the cache, or from the index into it. Raises NoWheel."""

    def cached() -> Path | None:
        fits = [one for one in place.glob(f"{package}-{version}-*.whl") if arch in one.name or "-any" in one.name]
        return max(fits, default=None)

    place.mkdir(parents=True, exist_ok=True)
    if cached() is None:
        done = _pip(["download", "-d", str(place)], package, version, arch)
        if done.returncode or cached() is None:
            said = (done.stderr or done.stdout).strip().splitlines() or ["pip says nothing"]
            raise NoWheel(f"{package} {version} ({arch}) is not in {place} and can't be downloaded: {said[-1]}")
    found = cached()
    assert found is not None
    return Wheel(package, found)


def over_network(package: str, version: str, arch: str) -> Wheel:
    """Return a wheel of hundreds of megabytes whose files are read from the index one by one. Raises NoWheel.

    By pip's own reader, which it looks up metadata with.
    """
    with tempfile.TemporaryDirectory() as nowhere:
        verb = ["install", "--dry-run", "--target", nowhere, "--report", "-"]
        done = _pip(verb, package, version, arch)
    try:
        from pip._internal.network.lazy_wheel import LazyZipOverHTTP
        from pip._internal.network.session import PipSession

        url = json.loads(done.stdout)["install"][0]["download_info"]["url"]
        return Wheel(package, LazyZipOverHTTP(url, PipSession(retries=1)))
    except Exception as error:  # of pip's, whose inside may change; of the network
        raise NoWheel(f"{package} {version} ({arch}) can't be read from the index: {error!r}") from error
