"""The record of a change to somebody else's library, and the one call that makes the changes."""

import importlib
import importlib.abc
import importlib.metadata
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet

EVERYWHERE = ("cpu", "cuda", "npu")
"""All platforms, those of other packages too."""
MEGATRON_CORE = ">=0.16.1,<0.17"
"""The versions of Megatron-Core that its patches were made for."""


@dataclass(frozen=True)
class Patch:
    """One attribute of one library that is replaced, and why."""

    package: str
    """Distribution name, as pip lists it."""
    versions: str
    """Version range in which the reason was seen and the replacement was tested."""
    target: str
    """`module:attribute.path`; `package.*:name` for that global of every module of the package that has it."""
    platforms: tuple[str, ...]
    reason: str
    """The fault without it, in one sentence."""
    upstream: str
    """Link to the library's own code or discussion of it."""
    until: str
    """Condition under which this patch may go."""
    make: Callable[[Any], Any]
    """Original attribute (None when the library never bound it) -> replacement."""

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def attribute(self) -> str:
        return self.target.partition(":")[2]

    def meets(self, platform: str) -> bool:
        """Return whether the patch is for a machine, as Platform.patches names it."""
        return self.platforms == EVERYWHERE or platform in self.platforms

    def concerns(self, module: str) -> bool:
        """Return True where importing `module` is the moment to apply this patch."""
        if self.module.endswith(".*"):
            return module == self.module[:-2] or module.startswith(self.module[:-1])
        return module == self.module

    def apply(self, module: Any) -> None:
        """Replace the attribute in an imported module."""
        *owners, name = self.attribute.split(".")
        holder = module
        for owner in owners:
            holder = getattr(holder, owner)
        if self.module.endswith(".*") and name not in vars(holder):
            return
        original = getattr(holder, name, None)
        if getattr(original, "_spmd_rl_patch", None) is not self:
            replacement = self.make(original)
            try:
                replacement._spmd_rl_patch = self
            except AttributeError:  # constants such as False carry no mark, and need none
                assert replacement is None or isinstance(replacement, bool)
            setattr(holder, name, replacement)


class _PatchOnImport(importlib.abc.MetaPathFinder):
    """Applies patches to a module right after its first import, before its importers read the attribute."""

    def __init__(self, patches: Iterable[Patch]):
        self.patches = tuple(patches)
        self._packages = {patch.module.partition(".")[0] for patch in self.patches}
        self._searching: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in self._packages:  # thousands of modules: nothing is compared for most
            return None
        concerned = [patch for patch in self.patches if patch.concerns(name)]
        if not concerned or name in self._searching:
            return None
        self._searching.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching.discard(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for patch in concerned:
                patch.apply(module)

        spec.loader.exec_module = exec_module
        return spec


def unmet_versions(patches: Iterable[Patch]) -> list[str]:
    """Return what is wrong with the installed versions, one line a package; empty when every patch fits."""
    problems: dict[str, str] = {}
    for patch in patches:
        try:
            installed = importlib.metadata.version(patch.package)
        except importlib.metadata.PackageNotFoundError:
            problems.setdefault(
                patch.package, f"{patch.package} is not installed; bash launch/setup_env.sh installs it"
            )
            continue
        if not SpecifierSet(patch.versions).contains(installed, prereleases=True):
            problems.setdefault(
                patch.package,
                f"{patch.package} {installed} is outside {patch.versions}, the versions in which {patch.target} is known to "
                f"need a change ({patch.reason}); install a version of that range (bash launch/setup_env.sh), or, if "
                f"{patch.until}, remove the record from spmd_rl/patches/",
            )
    return list(problems.values())


def apply_all(patches: Iterable[Patch], platform: str) -> list[str]:
    """Apply the patches of this platform, now or when their module is first imported.

    Called once, from `program.py`, before Megatron-Core or vLLM is used. Returns one line a patch for the run's log.
    Raises ValueError when an installed version is outside a patch's range.
    """
    here = [patch for patch in patches if patch.meets(platform)]
    problems = unmet_versions(here)
    if problems:
        raise ValueError("\n".join(problems))
    sys.meta_path.insert(0, _PatchOnImport(here))
    packages = {patch.module.partition(".")[0] for patch in here}
    for name, module in list(sys.modules.items()):
        if module is not None and name.partition(".")[0] in packages:
            for patch in here:
                if patch.concerns(name):
                    patch.apply(module)
    return [f"patch {patch.package} {patch.target}: {patch.reason}" for patch in here]
