"""One machine: limits, memory, disk, devices. Each check takes what it looks at, so that a test can show it another."""

import os
import re
import resource
import shutil
import tempfile
import time
from pathlib import Path

from spmd_rl.doctor.finding import Finding
from spmd_rl.platforms import record

GIB = 1 << 30
MIB = 1 << 20
# Below this nothing of use can be written, whatever the model.
LEAST_FREE_BYTES = 64 * MIB
SPEED_BYTES = 64 * MIB
NPU_DRIVER = Path("/usr/local/Ascend/driver/version.info")
# What CANN 9.1, which requirements-npu.txt names, is compatible with; https://gitcode.com/cann/release-management
LEAST_NPU_DRIVER = (25, 2)
# A checkpoint keeps the weights, their fp32 copy and Adam's two moments: 14 bytes a parameter where the file has 2.
CHECKPOINT_TO_WEIGHTS = 7


def open_files(world_size: int, limit: int | None = None) -> Finding:
    """Every rank keeps sockets to every other, in three groups, beside files and libraries."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if limit == resource.RLIM_INFINITY:
        return Finding("open files", "no limit", "ok")
    least, wanted = 256 + 3 * world_size, 1024 + 8 * world_size
    fix = f"ulimit -n {max(65536, wanted)} before the launch (or LimitNOFILE / limits.conf on the nodes)"
    if limit < least:
        return Finding("open files", f"{limit} a process; {world_size} ranks need {least}", "stop", fix)
    if limit < wanted:
        return Finding("open files", f"{limit} a process; {wanted} are safe for {world_size} ranks", "warn", fix)
    return Finding("open files", f"{limit} a process", "ok")


def shared_memory(path: str = "/dev/shm", least_bytes: int = GIB) -> Finding:
    """NCCL, HCCL and torch pass data between the ranks of a node through it; containers often get 64 MiB."""
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Finding("shared memory", f"{path}: {error.strerror}", "warn", f"mount a tmpfs at {path}")
    found = f"{path} has {in_bytes(usage.free)} free of {in_bytes(usage.total)}"
    if usage.free < least_bytes:
        fix = "start the container with --shm-size=16g or --ipc=host; remove what dead processes left there"
        return Finding("shared memory", f"{found}; {in_bytes(least_bytes)} are safe", "warn", fix)
    return Finding("shared memory", found, "ok")


def run_directory(run_dir: Path, weights_bytes: int = 0, measure: bool = True) -> list[Finding]:
    """Check that the run can write there, how fast, and that a checkpoint fits. Leaves nothing behind.

    `weights_bytes`: the model's weight files; 0: not known.
    """
    name = "run directory"
    place = run_dir.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    knob = f"run.dir = {run_dir}"
    fix = "name a directory that this user can write with --run.dir"
    if not place.is_dir():
        return [Finding(name, f"{knob}: {place} is not a directory", "stop", fix)]
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".spmd_rl_doctor_") as probe:
            free = shutil.disk_usage(place).free
            space = _space(knob, free, weights_bytes)
            if space.verdict == "stop" or not measure:
                return [space]
            return [space, _speed(probe, min(SPEED_BYTES, free // 4))]
    except OSError as error:
        if error.errno == 28:  # ENOSPC
            return [_space(knob, 0, weights_bytes)]
        return [Finding(name, f"{knob}: {place} cannot be written ({error.strerror})", "stop", fix)]


def _space(knob: str, free: int, weights_bytes: int) -> Finding:
    checkpoint = weights_bytes * CHECKPOINT_TO_WEIGHTS
    fix = "remove old runs or checkpoints, or name another disk with --run.dir"
    found = f"{knob}: {in_bytes(free)} free"
    if free < LEAST_FREE_BYTES:
        return Finding("disk space", f"{found}, which is full", "stop", fix)
    if weights_bytes and free < checkpoint:
        return Finding("disk space", f"{found}; one checkpoint takes up to {in_bytes(checkpoint)}", "warn", fix)
    room = f", room for {free // checkpoint:,} checkpoints of up to {in_bytes(checkpoint)}" if weights_bytes else ""
    return Finding("disk space", found + room, "ok")


def _speed(probe, size: int) -> Finding:
    block = os.urandom(MIB)
    started = time.perf_counter()
    for _ in range(max(1, size // MIB)):
        probe.write(block)
    probe.flush()
    os.fsync(probe.fileno())
    rate = max(1, size // MIB) * MIB / (time.perf_counter() - started)
    found = f"{in_bytes(rate)}/s written and synced ({in_bytes(size)})"
    if rate < 20 * MIB:
        return Finding("disk speed", found, "warn", "checkpoints will take long: use a faster disk for --run.dir")
    return Finding("disk speed", found, "ok")


def devices(kind: str, visible: int, ranks_here: int, cores: int | None = None) -> Finding:
    """Check that every rank of this node has a device of its own (CPU: a core)."""
    variable = record(kind).visible_devices_variable
    if not variable:
        cores = cores or len(os.sched_getaffinity(0))
        found = f"{cores} CPU cores for {ranks_here} ranks"
        if ranks_here > cores:
            return Finding("devices", found, "warn", f"ranks will share cores: start {cores} or fewer on this node")
        return Finding("devices", found, "ok")
    found = f"{visible} {kind} devices for {ranks_here} ranks"
    if visible < ranks_here:
        fix = f"start {visible} ranks on this node, or look at {variable} and what the container was given"
        return Finding("devices", found, "stop", fix)
    return Finding("devices", found, "ok")


def npu_driver(file: Path = NPU_DRIVER) -> Finding:
    """Check that the host's driver, which a container is lent, is not older than CANN allows."""
    name = "NPU driver"
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        fix = f"mount it into the container: -v {file}:{file} (docs/install.md)"
        return Finding(name, f"{file}: {error.strerror}", "warn", fix)
    version = re.search(r"^(?:package_)?version=((\d+)\.(\d+)\S*)", text, re.IGNORECASE | re.MULTILINE)
    if version is None:
        return Finding(name, f"{file} names no version", "skip")
    if (int(version[2]), int(version[3])) < LEAST_NPU_DRIVER:
        least = ".".join(map(str, LEAST_NPU_DRIVER))
        fix = "update driver and firmware of the host: a container cannot bring its own (docs/install.md)"
        return Finding(name, f"Ascend HDK {version[1]}; CANN 9.1 needs {least} or newer", "warn", fix)
    return Finding(name, f"Ascend HDK {version[1]}", "ok")


def vector_units(flags: str | None = None) -> list[Finding]:
    """Say what an x86 CPU lacks for bfloat16; nothing where it lacks nothing. `flags`: as /proc/cpuinfo has them."""
    if flags is None:
        file = Path("/proc/cpuinfo")
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        flags = next((line.partition(":")[2] for line in lines if line.startswith("flags")), "")
    has = flags.split()
    if not has or "avx512f" in has:
        return []
    found = f"no AVX-512 ({', '.join(name for name in ('avx2', 'avx') if name in has) or 'no AVX'})"
    return [
        Finding("CPU", found, "ok", "bfloat16 has no kernels of its own here and is slow: take model.dtype = float32")
    ]


def weights_bytes(model: str) -> int:
    """Size of the weight files of a Hugging Face directory; 0 where there are none."""
    return sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))


def in_bytes(number: float) -> str:
    """1536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TiB"
