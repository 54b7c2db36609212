"""Installed packages against the set that was tested together."""

import importlib.metadata
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from spmd_rl.doctor.finding import Finding
from spmd_rl.patches.patch import Patch, unmet_versions
from spmd_rl.platforms import record

ROOT = Path(__file__).resolve().parents[2]
LISTED = 6


def installed_version(name: str) -> str | None:
    """As pip would list it; None: not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def known_set(kind: str, root: Path = ROOT) -> tuple[list[Requirement], list[Requirement]]:
    """(those that a run depends on, all others that are pinned beside them) for `cpu`, `cuda` or `npu`.

    From pyproject.toml's extra of that name and requirements-<kind>.txt. Raises OSError where spmd_rl is installed
    without its source tree.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["optional-dependencies"].get(kind, ()), *project["dependencies"]]
    core = {canonicalize_name(line.name): line for line in map(Requirement, lines)}
    words = (
        line.split("#")[0].strip()
        for line in (root / f"requirements-{kind}.txt").read_text(encoding="utf-8").splitlines()
    )
    pinned = {canonicalize_name(line.name): line for line in map(Requirement, filter(None, words))}
    # A pin is narrower than pyproject.toml's range: outside the pin is untested, outside the range is wrong.
    rest = [line for name, line in pinned.items() if str(core.get(name, "")) != str(line)]
    return list(core.values()), rest


def version_findings(
    kind: str,
    patches: Iterable[Patch],
    version: Callable[[str], str | None] = installed_version,
    root: Path = ROOT,
) -> list[Finding]:
    """Check that what is installed is the set that was tested on this kind of machine."""
    try:
        core, rest = known_set(kind, root)
    except OSError as error:
        return [Finding("versions", f"the tested set cannot be read: {error}", "skip")]
    fix = f"bash launch/setup_env.sh {kind} makes an environment with exactly the tested versions"
    wrong, others = _unmet(core, version), _unmet(rest, version)
    found = []
    if wrong:
        found.append(Finding("versions", "; ".join(wrong), "stop", fix))
    if others:
        more = f" and {len(others) - LISTED} more" if len(others) > LISTED else ""
        found.append(Finding("versions", "not as tested: " + "; ".join(others[:LISTED]) + more, "warn", fix))
    if not found:
        found.append(Finding("versions", f"as tested for {kind}: {_names(core, version)}", "ok"))
    here = [patch for patch in patches if patch.meets(record(kind).patches)]
    unmet = unmet_versions(here)
    found += [Finding("patches", problem, "stop", fix) for problem in unmet]
    if not unmet:
        found.append(Finding("patches", f"{len(here)} patches fit the installed versions", "ok"))
    return found


def _unmet(lines: list[Requirement], version: Callable[[str], str | None]) -> list[str]:
    found = []
    for line in lines:
        if line.marker is not None and not line.marker.evaluate():
            continue
        installed = version(line.name)
        if installed is None:
            found.append(f"{line.name} is not installed, tested with {line.specifier}")
        elif not line.specifier.contains(installed, prereleases=True):
            found.append(f"{line.name} is {installed}, tested with {line.specifier}")
    return found


def _names(lines: list[Requirement], version: Callable[[str], str | None]) -> str:
    exact = [line for line in lines if str(line.specifier).startswith("==")]
    return ", ".join(f"{line.name} {version(line.name)}" for line in exact[:4])
