"""A device, its driver and a vLLM that only count bytes: what is on a device when, in the program's own order of calls.

Real are the worker, the trainer, the learners' and optimizer's moves, the switch, the engine and the saver; Megatron,
vLLM's LLM and all tensors are not there.
"""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import torch

from spmd_rl.platforms.cuda import CUDA
from spmd_rl.weights.device_memory import LearnerBytes, RankBytes


class OutOfMemory(Exception):
    """The device has no such room."""


class Device:
    """Memory of torch's allocator and of a driver: what torch frees, it keeps until it is told to give back."""

    def __init__(self, total: int):
        self.total, self.allocated, self.kept, self.mapped, self.peak = total, 0, 0, 0, 0
        self.expandable = False
        self.said: list[str] = []

    @property
    def taken(self) -> int:
        """Bytes that the driver has given away."""
        return self.allocated + self.kept + self.mapped

    @property
    def live(self) -> int:
        """Bytes that somebody uses."""
        return self.allocated + self.mapped

    def _look(self) -> None:
        if self.taken > self.total:
            raise OutOfMemory(f"{self.taken} of {self.total}: {self.said}")
        self.peak = max(self.peak, self.live)

    def take(self, size: int) -> None:
        """As torch does for a tensor."""
        self.kept -= min(size, self.kept)
        self.allocated += size
        self._look()

    def free(self, size: int) -> None:
        """A tensor's memory, which torch keeps."""
        self.allocated -= size
        self.kept += size
        assert self.allocated >= 0

    def give_back(self) -> None:
        self.kept = 0

    def map(self, size: int) -> None:
        """As vLLM's sleep mode asks the driver."""
        self.mapped += size
        self._look()

    def unmap(self, size: int) -> None:
        self.mapped -= size
        assert self.mapped >= 0

    @contextmanager
    def phase(self, name: str, peaks: dict[str, int]):
        """Remember the peak of what happens inside."""
        self.said.append(name)
        self.peak = 0
        yield
        peaks[name] = max(peaks.get(name, 0), self.peak, self.live)

    def platform(self):
        """A machine with this device."""

        def expandable(on: bool) -> None:
            self.expandable = on

        return replace(
            CUDA,
            name="counted",
            device_type="cpu",
            free_and_total_bytes=lambda: (self.total - self.taken, self.total),
            give_back_memory=lambda: self.give_back(),
            reset_peak_memory=lambda: None,
            memory_bytes=lambda: self.taken,
            peak_memory_bytes=lambda: self.peak,
            expandable_segments=expandable,
            synchronize=lambda: None,
            visible_devices_variable="",
            claim=lambda local_rank: None,
        )


class Counted:
    """Bytes that are on the device or not; with the methods of what is offloaded, and of what is released."""

    def __init__(self, device: Device, size: int, here: bool = True):
        self.device, self.size, self.here = device, size, False
        if here:
            self.onload()

    def onload(self) -> None:
        if not self.here:
            self.device.take(self.size)
            self.here = True

    def offload(self) -> None:
        if self.here:
            self.device.free(self.size)
            self.here = False

    restore, release = onload, offload

    @property
    def released(self) -> bool:
        return not self.here


class Model(Counted):
    """A model of a shard: weights, and nothing else."""

    def __init__(self, device: Device, size: int, shape):
        super().__init__(device, size)
        self.module = SimpleNamespace(requires_grad_=lambda on: None, last=None, layers=(), named=lambda: ())
        self.shape, self.dtype = shape, torch.bfloat16
        self.place = SimpleNamespace(rank=0, reports=False)
        self.head = None

    def load(self):
        """Read nothing: its memory is counted."""

    def forward(self, packs, head=None) -> list:
        assert self.here, "its weights are elsewhere"
        return []

    def weights(self) -> dict:
        return {}

    def merged_weights(self) -> dict:
        assert self.here, "its weights are elsewhere"
        return {}

    def broken(self) -> str:
        return ""


class State(Counted):
    """A part of an optimizer's: its own weights, and from the first step on its moments."""

    inner = None

    def __init__(self, device: Device, masters: int, moments: int):
        super().__init__(device, masters)
        self.moments = moments

    def step(self) -> None:
        assert self.here, "this part of the optimizer is elsewhere"
        self.device.take(self.moments)
        self.size, self.moments = self.size + self.moments, 0

    def tensors(self) -> tuple:
        assert self.here, "this part of the optimizer is elsewhere"
        return ()


def states(device: Device, one: LearnerBytes) -> list[State]:
    """Part a learner's: as many of the largest as there are, and what is left."""
    whole, rest = divmod(one.optimizer, one.part)
    sizes = [one.part] * whole + ([rest] if rest else [])
    return [State(device, size * one.masters // one.optimizer, size * one.moments // one.optimizer) for size in sizes]


class LLM:
    """vLLM's, with its own refusals."""

    device: Device
    held: RankBytes

    def __init__(self, path, *, kv_cache_memory_bytes, gpu_memory_utilization, enable_sleep_mode, **options):
        free = self.device.total - self.device.taken
        if free < self.device.total * gpu_memory_utilization:
            raise ValueError("Free memory on device on startup is less than desired GPU memory utilization")
        assert enable_sleep_mode and not self.device.expandable, "expandable segments: no pools"
        self.pools = {"weights": self.held.engine, "kv_cache": kv_cache_memory_bytes}
        self.asleep = set(self.pools)
        self.wake_up(list(self.pools))
        self.model = torch.nn.Module()
        worker = SimpleNamespace(model_runner=self)
        executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
        self.llm_engine = SimpleNamespace(model_executor=executor)
        self.model_config = SimpleNamespace(dtype=torch.bfloat16)

    def get_model(self):
        return self.model

    def sleep(self, level: int) -> None:
        assert level == 2
        for tag in set(self.pools) - self.asleep:
            self.device.unmap(self.pools[tag])
        self.asleep = set(self.pools)

    def wake_up(self, tags) -> None:
        assert not self.device.expandable, "expandable segments: no pools"
        for tag in tags:
            assert tag in self.asleep
            self.device.map(self.pools[tag])
            self.asleep.discard(tag)

    def reset_prefix_cache(self) -> None:
        assert not self.asleep, "the engine sleeps"
