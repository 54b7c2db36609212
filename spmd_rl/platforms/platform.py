"""The record of what differs between machines. It imports no torch: a command line reads it too."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from spmd_rl.errors import ConfigError, Problem
from spmd_rl.platforms.kernels import Kernels

if TYPE_CHECKING:
    import torch

    from spmd_rl.models.model_shape import ModelShape
    from spmd_rl.platforms.attention_layout import Attend, AttentionLayout
    from spmd_rl.platforms.cpu_peer_memory import PeerMemory
    from spmd_rl.platforms.grouped_matmul import ExpertCounts

RowSums = Callable[..., None]
"""A compiled loop, see platforms/cpu_row_sums.py."""


def lazily(where: str) -> Callable[..., Any]:
    """Return a function, given as module:name, whose module is imported when it is called: records import no torch."""
    module, _, name = where.partition(":")
    return lambda *arguments: attrgetter(name)(import_module(module))(*arguments)


def torch_rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return x over the root mean square of its last dimension, times `weight`."""
    import torch.nn.functional as F

    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


def torch_rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Turn the halves of the last dimension of x [T, heads, d] by each token's angles [T, 1, d]."""
    import torch

    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-second, first), dim=-1) * sines


def torch_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return hidden @ weight.T."""
    return hidden @ weight.T


def torch_add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a @ b, in float32, to a total in float32."""
    total.addmm_(a.float(), b.float())


class Profile(Protocol):
    """Stand for a profiler, torch's or one like it."""

    def __enter__(self) -> Profile: ...

    def __exit__(self, *raised: object) -> object: ...

    def export_chrome_trace(self, path: str) -> object:
        """Write what was recorded."""
        ...


def torch_profiler(shapes: bool, stacks: bool, memory: bool) -> Profile:
    """Return torch's profiler, of the host and of what else torch sees here."""
    from torch.profiler import profile

    return profile(record_shapes=shapes, with_stack=stacks, profile_memory=memory)


def free_host_bytes() -> int:
    """Return the memory of this machine, or of this container, that a process could have now."""
    with open("/proc/meminfo", encoding="utf-8") as lines:
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    with suppress(OSError, ValueError):  # no limit ("max"), or not a container
        limit, used = (
            int(Path(f"/sys/fs/cgroup/memory.{name}").read_text(encoding="utf-8")) for name in ("max", "current")
        )
        free = min(free, max(0, limit - used))
    return free


class RefusedVariable(NamedTuple):
    """A variable of the environment with which the program can't run."""

    settings: tuple[str, ...]
    """Parts of its value that are refused."""
    met: str
    way: str


_REFUSED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": RefusedVariable(
        ("1",),
        "vLLM would compute in another process than the rank, which writes its weights: there is one engine a process",
        "unset VLLM_ENABLE_V1_MULTIPROCESSING, or set it to 0",
    ),
}
"""On every machine."""


@dataclass(frozen=True)
class Platform:
    """All that differs between Ascend NPUs, NVIDIA GPUs, CPUs and what comes: a new machine is one of these records."""

    name: str
    """As `run.platform` names it."""
    device_type: str
    """Its name in `torch.device(...)`."""
    backend: str
    """The `torch.distributed` backend string of the default process group."""
    environment: Mapping[str, str]
    """Variables that the libraries read when they are imported; a value that the user has set stays."""
    attention: Callable[[AttentionLayout], Attend]
    """Prepare the attention of one micro-batch, which every layer then calls."""
    memory_bytes: Callable[[], int]
    """Bytes in use now: on the device, or resident in the process on a CPU."""
    peak_memory_bytes: Callable[[], int]
    """The highest `memory_bytes` since the last reset, or of the process where that is all there is."""
    reset_peak_memory: Callable[[], None]
    give_back_memory: Callable[[], None]
    """Return what the allocator keeps for itself, when the device changes hands."""
    bucket_bytes: int
    """Messages of a refresh of about this size use the links well and stay small beside the weights."""
    link_probe_bytes: int
    """Size of the doctor's large messages."""
    socket_variables: tuple[str, ...]
    """Name the network interface of each library, gloo's first."""
    more_environment: Callable[[], Mapping[str, str]] = dict
    """More of `environment`, which depends on what is installed."""
    model_environment: Callable[[ModelShape, int, int, int], Mapping[str, str]] = lambda *model: {}
    """(shape, ranks of an engine's tensor and expert parallelism, rollout.max_sequences) -> more for this model."""
    slower_paths: Callable[[ModelShape, str], list[str]] = lambda shape, dtype: []
    """(shape, model.dtype) -> why, of each kernel that training does without on this device, which is claimed."""
    refused_environment: Mapping[str, RefusedVariable] = field(default_factory=dict)
    """Variables with which, set so, the program can't run."""
    free_and_total_bytes: Callable[[], tuple[int, int]] | None = None
    """Memory of the device; None: the machine's own, which the engine does not measure."""
    expandable_segments: Callable[[bool], None] = lambda on: None
    """Let torch's allocator grow its segments: while training has the device, not while the engine makes its pools."""
    missing: Callable[[], str] = lambda: ""
    """Why this process can't run on such a machine, and the way out; "" where it can."""
    claim: Callable[[int], None] = lambda local_rank: None
    """Make the device of this local rank current, before any process group exists."""
    visible_devices_variable: str = ""
    """Restricts the devices that a process sees; "" where ranks have no devices of their own."""
    device_count: Callable[[], int] = lambda: 0
    """Devices that this process sees; 0 where ranks have none of their own."""
    patched_as: str = ""
    """The platform whose patch records apply; "": its own name."""
    kernels: Kernels = Kernels()
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] = torch_rms_norm
    """(x [..., H], weight [H], epsilon) -> [..., H]."""
    grouped_matmul: Callable[[torch.Tensor, torch.Tensor, ExpertCounts], torch.Tensor] = lazily(
        "spmd_rl.platforms.grouped_matmul:looped_matmul"
    )
    """(x [T, K], whose rows lie expert by expert; weight [E, N, K]; rows of each expert) -> [T, N]."""
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = torch_rotate
    """(x [T, heads, d], cosines [T, 1, d], sines [T, 1, d]) -> x, its halves turned."""
    add_product: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None] = torch_add_product
    """(total [M, N] float32, a [M, K] float32, b [K, N] in the model's dtype): total += a @ b, summed in float32."""
    logits: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch_logits
    """(hidden [N, H], weight [V, H]) -> [N, V], in their dtype and without a graph."""
    adds_gradients: bool = False
    """A linear layer's `add_product` adds the gradient of its weight to those of the micro-batches before."""
    fused_adamw: bool = False
    """torch's AdamW has one kernel here, that reads parameter, gradient and moments once."""
    swiglu: Callable[[torch.Tensor], torch.Tensor] = lazily("spmd_rl.platforms.swiglu:swiglu")
    """(x [..., 2I], gate before up) -> silu(gate) * up [..., I], of a dense layer."""
    weighted_swiglu: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lazily(
        "spmd_rl.platforms.swiglu:weighted_swiglu"
    )
    """(x [T, 2I], gate before up; probs [T]) -> silu(gate) * up * probs [T, I]."""
    offloads: bool = True
    """Tensors can leave the device for (pinned) host memory; on a CPU they are there anyway."""
    synchronize: Callable[[], None] = lambda: None
    """Wait until the device has done all that was asked of it."""
    repeats_exactly: bool = False
    """The same run twice gives the same bits, without run.deterministic."""
    deterministic_environment: Mapping[str, str] = field(default_factory=dict)
    """More of `environment`, for run.deterministic."""
    forks: bool = True
    """A process that holds its device may be copied (fork): a checkpoint is then written in the background."""
    max_sequences: int = 256
    """Value of rollout.max_sequences where that is None."""
    microbatch_tokens: int = 16384
    """Value of train.tokens_per_microbatch where that is None."""
    wraps_integers: bool = True
    """Its sums and products of whole numbers wrap around, as checksums count on; else those are made on the host."""
    engine_options: Mapping[str, object] = field(default_factory=dict)
    """Options of `vllm.LLM` that only this machine needs."""
    engine_model_options: Callable[[str, ModelShape, int, str], dict[str, object]] = lambda *model: {}
    """(a model's directory, its shape, rollout.block_tokens, the setting that names the directory) -> more of them.
    Raises ConfigError where vLLM has no kernels for it."""
    profiler: Callable[[bool, bool, bool], Profile] = torch_profiler
    """(shapes, stacks, memory) -> a profile of what is done inside of it."""
    engine_graphs: bool = True
    """The engine can run a device's graphs (rollout.eager)."""
    engine_returns_experts: bool = True
    """vLLM itself says which experts each token was sent to; elsewhere rollout/expert_capture.py reads its routers."""
    engine_sleeps: bool = True
    """vLLM's sleep mode releases weights and cache; elsewhere rollout/packed_weights.py does, on a CPU."""
    after_engine_start: Callable[[], None] = lambda: None
    """Undo what starting vLLM changes for the rest of the process."""
    row_sums: Callable[[int], RowSums] | None = None
    """(bytes of an element) -> a loop that sums checksums where the weights lie; None: torch's kernels do."""
    peer_memory: Callable[[int, Callable[[Any], list[Any]], Callable[[], None]], PeerMemory] | None = None
    """(rank, gather, barrier) -> what ranks of one node read each other's weights with; None: they are sent."""

    def device(self, local_rank: int) -> torch.device:
        """Return the device of a rank of this node."""
        import torch

        return torch.device(self.device_type, *([local_rank] if self.visible_devices_variable else []))

    def set_model_environment(self, shape: ModelShape, tensor: int, expert: int, max_sequences: int) -> list[str]:
        """Set the variables that depend on the model and that the user has not set; return a note for each."""
        wanted = self.model_environment(shape, tensor, expert, max_sequences)
        new = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(new)
        return [f"{name} = {value}, by the model's sizes" for name, value in new.items()]

    def set_environment(self, deterministic: bool = False) -> None:
        """Set the variables that the user has not set. Raises ConfigError for one that the program can't run with."""
        for name, refused in {**_REFUSED, **self.refused_environment}.items():
            value = os.environ.get(name, "").replace(" ", "")
            if any(part in value for part in refused.settings):
                raise ConfigError(Problem(name, os.environ[name], refused.met, refused.way))
        exact = self.deterministic_environment if deterministic else {}
        for name, value in {**self.environment, **self.more_environment(), **exact}.items():
            os.environ.setdefault(name, value)

    def make_deterministic(self) -> None:
        """Have torch take kernels that give the same bits each time, and warn of those that it has not."""
        if not self.repeats_exactly:
            import torch

            torch.use_deterministic_algorithms(True, warn_only=True)

    @property
    def patches(self) -> str:
        """The name by which patch records know this machine."""
        return self.patched_as or self.name
