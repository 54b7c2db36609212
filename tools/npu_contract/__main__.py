"""Check what we rely on in the wheels for NPUs: python -m tools.npu_contract [--arch aarch64] [--profile 0.23]

Wheels are downloaded once, by pip, into SPMD_RL_NPU_WHEELS (else ~/.cache/spmd_rl/npu_wheels). A row that fails says
that an assumption of ours does not hold any more, or that upstream closed a gap which a patch of ours is for.
"""

import argparse
import os
import sys
import warnings
from pathlib import Path

from spmd_rl.doctor.profiles import CANN, PROFILES
from tools.npu_contract.rows import ROWS, check
from tools.npu_contract.scan import scan
from tools.npu_contract.wheel import NoWheel, Wheel, fetch, over_network

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch_npu", "vllm_ascend", "megatron_core")


def place() -> Path:
    """Return where wheels are kept."""
    return Path(os.environ.get("SPMD_RL_NPU_WHEELS", Path.home() / ".cache" / "spmd_rl" / "npu_wheels"))


def wheels_of(profile: str, arch: str) -> dict[str, Wheel]:
    """Return the wheels of a profile. Raises NoWheel."""
    versions = {name.replace("-", "_"): version for name, version in PROFILES[profile].items()}
    found = {name: fetch(name, versions[name], arch, place()) for name in PACKAGES}
    try:  # hundreds of megabytes, and we rely on a few files of it
        found["vllm"] = over_network("vllm", versions["vllm"], arch)
    except NoWheel as error:
        warnings.warn(f"{profile} {arch}: vLLM's own rows NOT CHECKED: {error}", stacklevel=2)
    return found


def examine(profile: str, wheels: dict[str, Wheel]) -> tuple[list[str], int, int]:
    """Return what does not hold, and how many rows and uses were looked at."""
    rows = [row for row in ROWS if row.profile in ("", profile) and row.package in wheels]
    wrong = [f"{row.package} {row.place} {row.what}: {why} ({row.why})" for row in rows if (why := check(row, wheels))]
    uses, found = scan(ROOT / "spmd_rl", wheels)
    return [*wrong, *found], len(rows), uses


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.npu_contract", description=__doc__.splitlines()[0])
    parser.add_argument("--profile", action="append", choices=sorted(PROFILES))
    parser.add_argument("--arch", action="append", choices=("x86_64", "aarch64"))
    options = parser.parse_args()
    status = 0
    for profile in options.profile or sorted(PROFILES):
        for arch in options.arch or ("x86_64", "aarch64"):
            try:
                wheels = wheels_of(profile, arch)
            except NoWheel as error:
                print(f"{profile} {arch}: NOT CHECKED: {error}", file=sys.stderr)
                status = status or 2
                continue
            wrong, rows, uses = examine(profile, wheels)
            print(f"{profile} {arch} (CANN {CANN[profile]}): {rows} rows, {uses} uses, {len(wrong)} wrong")
            for line in wrong:
                print(f"  {line}")
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
