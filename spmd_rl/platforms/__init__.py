"""The machines: one frozen record each, so that nothing else in the program asks where it runs.

Another package adds a machine with an entry point of the group `spmd_rl.platforms` whose value is its Platform.
"""

from functools import cache
from importlib import metadata

from spmd_rl.platforms.platform import Platform

GROUP = "spmd_rl.platforms"
# Name of `run.platform` -> where its record stands. `auto` takes the first that is here.
_OURS = {
    "npu": "spmd_rl.platforms.npu:NPU",
    "cuda": "spmd_rl.platforms.cuda:CUDA",
    "cpu": "spmd_rl.platforms.cpu:CPU",
}
CLUSTER = "npu"
"""The machine that is meant where none is named and none is here: of a plan made on a laptop."""
_chosen: Platform | None = None


@cache
def _table() -> dict[str, metadata.EntryPoint]:
    ours = {name: metadata.EntryPoint(name, value, GROUP) for name, value in _OURS.items()}
    others = {point.name: point for point in metadata.entry_points(group=GROUP) if point.name not in ours}
    return others | ours


def names() -> tuple[str, ...]:
    """Return the machines that `run.platform` can name, beside `auto`."""
    return tuple(sorted(_table()))


@cache
def record(name: str) -> Platform:
    """Return a machine's record, whether or not it is here. Raises ValueError for a name that there is not."""
    if name not in _table():
        raise ValueError(f"run.platform = {name}: there are auto, {', '.join(names())}")
    return _table()[name].load()


def detect() -> str:
    """Return the name of the best machine that is here: an accelerator of another package, an NPU, a GPU, the CPU."""
    return next(name for name in _table() if not record(name).missing())


def current(name: str = "") -> Platform:
    """Return the record of the machine that this process runs on.

    `name`: as run.platform; the program gives it once, at its start, and it holds from then on. Raises ValueError for
    a machine that is not here.
    """
    global _chosen
    if name or _chosen is None:
        found = record(detect() if name in ("", "auto") else name)
        if why := found.missing():
            raise ValueError(f"run.platform = {found.name}: {why}")
        _chosen = found
    return _chosen
