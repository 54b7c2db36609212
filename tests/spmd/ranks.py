"""Run a module's `main()` on several CPU ranks, and bring back what each rank reports."""

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from spmd.server import the_server
from spmd_rl.testing.launcher import ROOT

__all__ = ("ROOT", "arguments", "end_megatron", "join", "ready", "report", "run_program", "run_ranks")


def run_ranks(
    module: str, ranks: int, arguments: dict, timeout_seconds: float = 600, server: str = "spmd.server"
) -> list[dict]:
    """Have so many ranks call `module.main()`, which calls `report(...)` once. Returns the reports in rank order.

    `server`: the module of what they are forked from.
    """
    return the_server(server).run(module, ranks, arguments, timeout_seconds)


def run_program(program: str, ranks: int, *words: object) -> str:
    """Have so many ranks run a module (or a file) as `python -m` does. Returns what all of them wrote to stdout.

    For what a program does; how it is started and ended is seen where torchrun starts it.
    """
    with tempfile.NamedTemporaryFile() as output:
        asked = {"program": program, "words": list(map(str, words)), "output": output.name}
        run_ranks("spmd.program_ranks", ranks, asked)
        return Path(output.name).read_text()


def arguments() -> dict:
    """In a rank: what the test asked for."""
    return json.loads((Path(os.environ["SPMD_TEST_DIR"]) / "arguments.json").read_text())


def report(rank: int, value: dict) -> None:
    """In a rank: what the test will see."""
    (Path(os.environ["SPMD_TEST_DIR"]) / f"rank{rank}.json").write_text(json.dumps(value))


_patched: dict[str, str] = {}
"""Library -> the machine, as patches know it."""


def join(platform: Any) -> Any:
    """In a rank: the world."""
    from spmd_rl.distributed import world as worlds

    return worlds.start(platform, 600)


def ready(*libraries: str) -> Any:
    """In a rank, before it imports them: the platform, its environment set and the libraries' patches applied.

    The platform is the test's `platform`, which a package on its `paths` may bring, else SPMD_RL_TEST_PLATFORM's, else
    the CPU.
    """
    from spmd_rl import platforms

    if paths := [path for path in arguments().get("paths", ()) if path not in sys.path]:
        sys.path[:0] = paths
        platforms._table.cache_clear()
    platform = platforms.current(arguments().get("platform", os.environ.get("SPMD_RL_TEST_PLATFORM", "cpu")))
    platform.set_environment()
    patched(platform, "torch_gloo", *libraries)
    return platform


def patched(platform: Any, *libraries: str) -> None:
    """Have the libraries' patches applied, once in a process and what is forked from it."""
    from spmd_rl.patches.patch import apply_all

    new = [library for library in libraries if library not in _patched]
    assert all(_patched[library] == platform.patches for library in libraries if library not in new)
    _patched.update(dict.fromkeys(new, platform.patches))
    patches = [importlib.import_module(f"spmd_rl.patches.{library}").PATCHES for library in new]
    apply_all([patch for some in patches for patch in some], platform.patches)


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
