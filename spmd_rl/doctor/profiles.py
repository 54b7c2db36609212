"""Sets of wheels for NPUs that were read against each other, and which of them an installation is nearest to."""

from collections.abc import Callable, Mapping

from packaging.version import Version

from spmd_rl.doctor.finding import Finding
from spmd_rl.doctor.versions import installed_version

PROFILES: Mapping[str, Mapping[str, str]] = {
    "0.23": {
        "torch": "2.10.0",
        "torch_npu": "2.10.0.post4",
        "vllm": "0.23.0",
        "vllm-ascend": "0.23.0",
        "megatron-core": "0.16.1",
    },
    "0.18": {
        "torch": "2.9.0",
        "torch_npu": "2.9.0",
        "vllm": "0.18.0",
        "vllm-ascend": "0.18.0",
        "megatron-core": "0.16.1",
    },
}
"""By vllm-ascend's version. What runs is written for the first; the second's names and signatures are checked too."""
CANN = {"0.23": "9.1.0", "0.18": "8.5.1"}
TARGET = "0.23"


def profile_findings(version: Callable[[str], str | None] = installed_version) -> list[Finding]:
    """Say which profile is installed, or the nearest one and what differs from it."""
    installed = {name: version(name) for name in PROFILES[TARGET]}
    differing = {name: _differences(wanted, installed) for name, wanted in PROFILES.items()}
    nearest = min(differing, key=lambda name: (len(differing[name]), name != TARGET))
    if not differing[TARGET]:
        return [Finding("profile", f"{TARGET}, with CANN {CANN[TARGET]}", "ok")]
    fix = f"start from the image quay.io/ascend/vllm-ascend:v{PROFILES[TARGET]['vllm-ascend']} (A3: -a3)"
    if not differing[nearest]:
        return [Finding("profile", f"{nearest}: only read against its wheels, not a target", "warn", fix)]
    differ = "; ".join(differing[nearest])
    return [Finding("profile", f"unknown; nearest is {nearest} (CANN {CANN[nearest]}): {differ}", "warn", fix)]


def _differences(wanted: Mapping[str, str], installed: Mapping[str, str | None]) -> list[str]:
    return [
        f"{name} is {found or 'not installed'}, not {wanted[name]}"
        for name, found in installed.items()
        if found is None or Version(found).public != Version(wanted[name]).public
    ]
