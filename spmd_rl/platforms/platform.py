"""The record of what differs between machines, and the one question which of them this is."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Platform:
    """Everything that differs between Ascend NPUs, NVIDIA GPUs and CPUs."""

    name: str
    """`npu`, `cuda` or `cpu`."""
    device_type: str
    """What `torch.device(...)` calls it."""
    backend: str
    """The `torch.distributed` backend string of the default process group."""
    vllm_package: str
    """The distribution that provides vLLM here; patch records look up its version."""
    environment: dict[str, str]
    """Variables that the libraries read when they are imported; a value that the user has set stays."""
    claim: Callable[[int], None]
    """Make the device of this local rank current, before any process group exists."""
    memory_bytes: Callable[[], int]
    """Bytes in use now: on the device, or resident in the process on a CPU."""
    peak_memory_bytes: Callable[[], int]
    """The highest `memory_bytes` since the last reset, or of the process where that is all there is."""
    reset_peak_memory: Callable[[], None]
    give_back_memory: Callable[[], None]
    """Return what the allocator keeps for itself, when the device changes hands."""
    bucket_bytes: int
    """Messages of a refresh of about this size use the links well and stay small beside the weights."""
    engine_options: dict[str, object] = field(default_factory=dict)
    """Options of `vllm.LLM` that only this machine needs."""
    engine_sleeps: bool = True
    """vLLM's sleep mode releases weights and cache; elsewhere rollout/engine.py releases the storages itself."""
    shares_prompts: bool = False
    """The attention of training/attention.py can compute a group's common prompt once."""
    after_engine_start: Callable[[], None] = lambda: None
    """Undo what starting vLLM changes for the rest of the process."""


def detect() -> str:
    """The best machine that is here: an NPU, else a GPU, else the CPU."""
    if importlib.util.find_spec("torch_npu") is not None:
        return "npu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def current(name: str = "auto") -> Platform:
    """The record of this machine; asked once, in `program.py`, and passed on.

    Raises ValueError when `run.platform` names a machine that is not here.
    """
    if name == "auto":
        name = detect()
    if name == "cpu":
        from spmd_rl.platforms.cpu import CPU

        return CPU
    if name == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ValueError(
                "run.platform = cuda: torch sees no GPU; use run.platform = auto, or install the cuda requirements"
            )
        from spmd_rl.platforms.cuda import CUDA

        return CUDA
    if name == "npu":
        if importlib.util.find_spec("torch_npu") is None:
            raise ValueError(
                "run.platform = npu: torch_npu is not installed; bash launch/setup_env.sh npu, or run.platform = auto"
            )
        from spmd_rl.platforms.npu import NPU

        return NPU
    raise ValueError(f"run.platform = {name}: there are auto, cpu, cuda, npu")
