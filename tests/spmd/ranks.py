"""Starts a script on several CPU ranks and brings back what each rank reports."""

import importlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from spmd_rl.testing.launcher import ROOT, environment, torchrun


def run_ranks(module: str, ranks: int, arguments: dict, timeout_seconds: float = 600) -> list[dict]:
    """Run `python -m module` under torchrun; each rank calls `report(...)` once. Returns the reports in rank order."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "arguments.json").write_text(json.dumps(arguments))
        done = subprocess.run(
            torchrun(ranks, "-m", module),
            env=environment(
                ROOT / "tests", SPMD_TEST_DIR=directory, VLLM_LOGGING_LEVEL="ERROR", PYTHONWARNINGS="ignore"
            ),
            cwd=ROOT,
            timeout=timeout_seconds,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{module} on {ranks} ranks failed:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
        return [json.loads((Path(directory) / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def arguments() -> dict:
    """In a rank: what the test asked for."""
    return json.loads((Path(os.environ["SPMD_TEST_DIR"]) / "arguments.json").read_text())


def report(rank: int, value: dict) -> None:
    """In a rank: what the test will see."""
    (Path(os.environ["SPMD_TEST_DIR"]) / f"rank{rank}.json").write_text(json.dumps(value))


def ready(*libraries: str) -> Any:
    """In a rank, before it imports them: the CPU platform, its environment set and the libraries' patches applied."""
    from spmd_rl.patches.patch import apply_all
    from spmd_rl.platforms import current

    platform = current("cpu")
    platform.set_environment()
    patches = [importlib.import_module(f"spmd_rl.patches.{library}").PATCHES for library in libraries]
    apply_all([patch for some in patches for patch in some], platform.patches)
    return platform


def end_megatron() -> None:
    """In a rank: end Megatron's process groups, and with them their threads: each looks at its sockets all the time."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    groups = [group for group in parallel_state._global_process_group_list or () if group is not None]
    parallel_state.destroy_model_parallel()
    dist.barrier()  # nobody is in one of their calls any more
    for group in groups:
        if group in dist.distributed_c10d._world.pg_map and group is not dist.group.WORLD:
            dist.destroy_process_group(group)
