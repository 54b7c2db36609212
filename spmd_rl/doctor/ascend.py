"""An Ascend machine before a run touches a die: wheels against dies, CANN and its libraries, memory, variables, ports.

Each check takes what it looks at, so that a test can show it another. Nothing here imports torch_npu: a process that
opens a die which does not answer may hang.
"""

import importlib.util
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from spmd_rl.doctor.finding import Finding
from spmd_rl.doctor.profiles import profile_findings

BASE_PORT, PORTS = 60000, 16
SMI_SECONDS = 60
_IDLE_MB = 4096
"""A die that nobody uses has less of its memory taken: CANN's own."""
# How npu-smi calls the dies of a machine.
_MACHINES = (("A3", re.compile(r"910_93|9391|9392|9381|9382|9372|9362|Ascend910\b")), ("A2", re.compile(r"910B\d?")))


@dataclass(frozen=True)
class Die:
    """Hold what npu-smi says of one die."""

    number: int
    name: str
    health: str
    used_mb: int
    total_mb: int
    processes: tuple[int, ...] = ()


def ascend_findings(ranks_here: int, environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Check this machine's NPUs and what drives them."""
    dies, trouble = read_dies()
    found = profile_findings()
    found += cann(environment) + libraries(environment) + variables(environment) + [base_port(environment)]
    if trouble:
        return [*found, trouble]
    return [*found, wheel(dies, build_of_vllm_ascend()), *memory(dies, ranks_here)]


def read_dies() -> tuple[list[Die], Finding | None]:
    """Ask npu-smi; the finding says why it has no answer."""
    fix = "run npu-smi info yourself; a die that hangs needs a reset by whoever runs the machine"
    try:
        done = subprocess.run(["npu-smi", "info"], capture_output=True, text=True, timeout=SMI_SECONDS, check=True)
    except FileNotFoundError:
        fix = "mount /usr/local/bin/npu-smi and /usr/local/dcmi into the container"
        return [], Finding("dies", "npu-smi is not here", "warn", fix)
    except subprocess.TimeoutExpired:
        return [], Finding("dies", f"npu-smi has not answered within {SMI_SECONDS} s: a die hangs", "stop", fix)
    except subprocess.CalledProcessError as error:
        said = (error.stdout + error.stderr).strip().splitlines() or ["nothing"]
        return [], Finding("dies", f"npu-smi failed: {said[-1]}", "stop", fix)
    return dies_of(done.stdout), None


def dies_of(text: str) -> list[Die]:
    """Read the table of `npu-smi info`: two lines a die (name and health, then memory), and below it its processes."""
    dies: list[Die] = []
    processes: dict[tuple[str, str], list[int]] = {}
    places: list[tuple[str, str]] = []
    head: tuple[str, str, str] | None = None
    for line in text.splitlines():
        cells = [cell.split() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and cells[0] and cells[0][0].isdigit():
            if len(cells[0]) > 1 and not cells[0][1].isdigit():
                head = cells[0][0], cells[0][1], " ".join(cells[1])
            elif head is not None and (sizes := re.findall(r"(\d+)\s*/\s*(\d+)", line)):
                # The last pair is HBM; the first is of chips that have other memory.
                used, total = map(int, sizes[-1])
                places.append((head[0], cells[0][0]))
                dies.append(Die(len(dies), head[1], head[2], used, total))
        elif len(cells) == 4 and len(cells[0]) >= 2 and cells[0][0].isdigit() and cells[1] and cells[1][0].isdigit():
            processes.setdefault((cells[0][0], cells[0][1]), []).append(int(cells[1][0]))
    return [
        Die(die.number, die.name, die.health, die.used_mb, die.total_mb, tuple(processes.get(place, ())))
        for die, place in zip(dies, places, strict=True)
    ]


def memory(dies: Iterable[Die], ranks_here: int, alive: Callable[[int], bool] | None = None) -> list[Finding]:
    """Check that the dies are well and free; processes that hold one and have ended are named."""
    alive = alive or (lambda process: Path(f"/proc/{process}").exists())
    found = []
    dies = list(dies)[:ranks_here]
    for die in dies:
        if die.health not in ("OK", ""):
            fix = "leave it out (ASCEND_RT_VISIBLE_DEVICES), or have it reset"
            found.append(Finding("dies", f"die {die.number} ({die.name}) is {die.health}", "stop", fix))
        if die.used_mb > _IDLE_MB:
            gone = [process for process in die.processes if not alive(process)]
            here = [process for process in die.processes if alive(process)]
            who = [f"process {process} uses it" for process in here]
            who += [
                f"process {process}, which has ended here (or is another container's), holds it" for process in gone
            ]
            fix = "end what uses it: kill " + " ".join(map(str, here)) if here else "have the die reset"
            said = "; ".join(who) or "by nobody that npu-smi names"
            taken = f"die {die.number} has {die.used_mb} of {die.total_mb} MB taken"
            found.append(Finding("die memory", f"{taken}: {said}", "stop", fix))
    if not found and dies:
        free = min(die.total_mb - die.used_mb for die in dies)
        found.append(Finding("die memory", f"{len(dies)} dies are well and have {free} MB or more free", "ok"))
    return found


def build_of_vllm_ascend() -> str:
    """Return the machine that vllm-ascend was built for, such as A2; "" where it does not say."""
    spec = importlib.util.find_spec("vllm_ascend")
    for place in spec.submodule_search_locations or () if spec is not None else ():
        file = Path(place) / "_build_info.py"
        if file.is_file() and (said := re.search(r"__device_type__ = '(\w+)'", file.read_text(encoding="utf-8"))):
            return said[1]
    return ""


def wheel(dies: Iterable[Die], built: str) -> Finding:
    """Check that vllm-ascend was built for the dies that are here."""
    names = sorted({die.name for die in dies})
    here = {machine for name in names for machine, pattern in _MACHINES if pattern.search(name)}
    said = ", ".join(names) or "no die"
    if not built or len(here) != 1:
        return Finding("wheel", f"vllm-ascend is built for {built or 'it does not say'}; dies: {said}", "skip")
    [machine] = here
    if machine != built:
        tag = "v0.23.0-a3" if machine == "A3" else "v0.23.0"
        fix = f"take the image quay.io/ascend/vllm-ascend:{tag}"
        return Finding("wheel", f"vllm-ascend is built for {built}, and these dies ({said}) are {machine}", "stop", fix)
    return Finding("wheel", f"vllm-ascend is built for {built}, as these dies are ({said})", "ok")


def cann(environment: Mapping[str, str]) -> list[Finding]:
    """Check that CANN's variables are set, and say its version."""
    home = environment.get("ASCEND_HOME_PATH", "")
    if not home:
        fix = "source launch/env.npu.sh, or CANN's set_env.sh (SPMD_RL_ASCEND: where it is)"
        return [Finding("CANN", "ASCEND_HOME_PATH is not set", "stop", fix)]
    for name in ("version.cfg", "ascend_toolkit_install.info"):
        file = Path(home) / name
        if file.is_file() and (said := re.search(r"(\d+\.\d+\.\w+[\w.]*)", file.read_text(encoding="utf-8"))):
            return [Finding("CANN", f"{said[1]} in {home}", "ok")]
    return [Finding("CANN", f"{home} does not say its version", "warn", "look at what ASCEND_HOME_PATH names")]


def libraries(environment: Mapping[str, str]) -> list[Finding]:
    """Check that Python finds CANN's `acl`, and the loader the library of operators (atb)."""
    found = []
    if importlib.util.find_spec("acl") is None:
        fix = "CANN's set_env.sh puts it on PYTHONPATH: only append to that afterwards"
        found.append(Finding("acl", "Python does not find it", "stop", fix))
    places = environment.get("LD_LIBRARY_PATH", "").split(":")
    if not any((Path(place) / "libatb.so").is_file() for place in places if place):
        fix = "source nnal/atb/set_env.sh, or launch/env.npu.sh; install nnal where it is missing"
        found.append(Finding("libatb", "it is in no directory of LD_LIBRARY_PATH", "stop", fix))
    return found or [Finding("acl, libatb", "both are found", "ok")]


def variables(environment: Mapping[str, str]) -> list[Finding]:
    """Check variables with which a run can't work, or works wrongly."""
    found = []
    nz = environment.get("VLLM_ASCEND_ENABLE_NZ", "0")
    if nz != "0":
        why = "a refresh can't write into weights in that format"
        found.append(Finding("variables", f"VLLM_ASCEND_ENABLE_NZ = {nz}: {why}", "stop", "unset it"))
    for name in ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = environment.get(name, "")
        if "expandable_segments:True" in value.replace(" ", ""):
            fix = f"unset {name}: training switches it on by itself"
            found.append(Finding("variables", f"{name} = {value}: vLLM's sleep mode refuses it", "stop", fix))
    if environment.get("ASCEND_LAUNCH_BLOCKING", "0") != "0":
        found.append(Finding("variables", "ASCEND_LAUNCH_BLOCKING is set: every operator waits", "warn", "unset it"))
    return found or [Finding("variables", "none is in the way", "ok")]


def base_port(environment: Mapping[str, str], proc: Path = Path("/proc/sys/net/ipv4")) -> Finding:
    """Check that no other connection may take the ports of HCCL's first contact."""
    first = int(environment.get("HCCL_IF_BASE_PORT", BASE_PORT))
    wanted = range(first, first + PORTS)
    try:
        low, high = map(int, (proc / "ip_local_port_range").read_text(encoding="utf-8").split())
        kept = (proc / "ip_local_reserved_ports").read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        return Finding("HCCL ports", f"the ports that connections take are not known: {error}", "skip")
    reserved = {
        port
        for part in kept.split(",")
        if part
        for port in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)
    }
    open_to_all = [port for port in wanted if low <= port <= high and port not in reserved]
    said = f"HCCL_IF_BASE_PORT = {first}: ports {first} to {wanted[-1]}"
    if open_to_all:
        fix = f"sysctl -w net.ipv4.ip_local_reserved_ports={first}-{wanted[-1]}, or another HCCL_IF_BASE_PORT"
        return Finding("HCCL ports", f"{said}; any connection may take them ({low} to {high})", "warn", fix)
    return Finding("HCCL ports", f"{said} are kept for it", "ok")
