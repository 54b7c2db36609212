"""launch/torchrun.sh and the Slurm jobs, with everything that they start replaced by something that writes it down."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deadlines import crowding
from spmd_rl.config.config import Config
from spmd_rl.config.fields import knobs

ROOT = Path(__file__).resolve().parents[2]

FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
*find_spec*) exit "${FAKE_LACKS_TORCH:-0}" ;;
*spmd_rl.doctor.before_launch*)
    echo "before $*" >>"$FAKE_LOG"
    echo "eth7 10.0.0.9"
    exit "${FAKE_REFUSES:-0}"
    ;;
*spmd_rl.runtime.torchrun*)
    echo "agent $*" >>"$FAKE_LOG"
    env | grep -E '^(GLOO|HCCL|NCCL|OMP|LD_PRELOAD)' | sed 's/^/env /' >>"$FAKE_LOG"
    [[ -z "${FAKE_RANK:-}" ]] || { "$REAL_PYTHON" -c "$FAKE_RANK" & wait; }
    exit "${FAKE_STATUS:-0}"
    ;;
esac
"""
# Does what a rank does when it is asked for a checkpoint: it says so and ends.
RANK = """
import os, signal
log = os.environ["FAKE_LOG"]
def save(*_):
    print("saved", file=open(log, "a"))
    os._exit(0)
signal.signal(signal.SIGUSR1, save)
print("rank", file=open(log, "a"))
while True:
    signal.pause()
"""
# srun: the same command on every "node", with what Slurm tells a task; signals are passed on.
FAKE_SRUN = """#!/usr/bin/env bash
echo "srun $*" >>"$FAKE_LOG"
while [[ "$1" == --* ]]; do [[ "$1" == *=* ]] && shift || shift 2; done
tasks=()
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    SLURM_NODEID=$node "$@" &
    tasks+=($!)
done
trap 'kill -USR1 "${tasks[@]}"' USR1
for task in "${tasks[@]}"; do
    while :; do
        status=0; wait "$task" || status=$?
        kill -0 "$task" 2>/dev/null || break
    done
done
exit "$status"
"""
FAKE_SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >>"$FAKE_LOG"
[[ "$1 $2" != "show hostnames" ]] || printf 'first\\nsecond\\n'
"""


class Machine:
    """A place with the launchers, devices by choice, and fakes on PATH."""

    def __init__(self, root: Path):
        self.root, self.log, self.dev = root / "source", root / "log", root / "dev"
        shutil.copytree(ROOT / "launch", self.root / "launch")
        self.dev.mkdir()
        self.bin = root / "bin"
        self.bin.mkdir()
        for name, text in (("python", FAKE_PYTHON), ("srun", FAKE_SRUN), ("scontrol", FAKE_SCONTROL)):
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)

    def devices(self, stem: str, count: int) -> "Machine":
        for number in range(count):
            (self.dev / f"{stem}{number}").touch()
        (self.dev / f"{stem}_manager").touch()
        return self

    def start(self, script: str, *words: str, **environment: str) -> subprocess.Popen:
        unwanted = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PLATFORM", "GLOO_SOCKET_IFNAME", "LD_PRELOAD")
        kept = {name: value for name, value in os.environ.items() if name not in unwanted}
        names = {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "PYTHON": str(self.bin / "python"),
            "REAL_PYTHON": sys.executable,
            "FAKE_LOG": str(self.log),
            "SPMD_RL_DEV": str(self.dev),
            "SPMD_RL_PRELOAD": "",
        }
        return subprocess.Popen(
            ["bash", str(self.root / script), *words],
            cwd=self.root,
            env=kept | names | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, script: str, *words: str, **environment: str) -> tuple[int, str]:
        process = self.start(script, *words, **environment)
        output, _ = process.communicate(timeout=60 * crowding())
        return process.returncode, output

    def lines(self, kind: str) -> list[str]:
        found = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.removeprefix(f"{kind} ") for line in found if line.startswith(kind)]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


TORCHRUN = "launch/torchrun.sh"
PROGRAM = ("-m", "spmd_rl.grpo", "--config", "a file.yaml", "--train.steps", "2")


def test_one_node_needs_nothing_but_the_program(machine):
    status, output = machine.run(TORCHRUN, *PROGRAM)
    assert (status, output) == (0, "")
    [agent] = machine.lines("agent")
    assert "--nnodes 1 --nproc-per-node 2 --max-restarts 0 --rdzv-backend c10d" in agent
    assert agent.endswith("-m spmd_rl.grpo --config a file.yaml --train.steps 2")
    [before] = machine.lines("before")
    assert before.endswith("-- -m spmd_rl.grpo --config a file.yaml --train.steps 2")


@pytest.mark.parametrize(("stem", "count"), [("davinci", 8), ("davinci", 16), ("nvidia", 8)])
def test_every_device_of_the_node_gets_a_rank(machine, stem, count):
    machine.devices(stem, count).run(TORCHRUN, *PROGRAM)
    assert f"--nproc-per-node {count} " in machine.lines("agent")[0]


def test_devices_that_the_job_may_not_see_are_not_counted(machine):
    machine.devices("davinci", 16).run(TORCHRUN, *PROGRAM, ASCEND_RT_VISIBLE_DEVICES="4,5,6")
    assert "--nproc-per-node 3 " in machine.lines("agent")[0]


def test_flags_and_variables_say_the_same(machine):
    flags = (
        "--nnodes",
        "2",
        "--node-rank=1",
        "--master-addr",
        "10.0.0.1",
        "--master-port",
        "31000",
        "--max-restarts=3",
    )
    machine.run(TORCHRUN, *flags, *PROGRAM)
    names = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "31000", "MAX_RESTARTS": "3"}
    machine.run(TORCHRUN, *PROGRAM, **names)
    one, other = machine.lines("agent")
    assert one == other
    assert "--nnodes 2 " in one and "--rdzv-endpoint 10.0.0.1:31000 --rdzv-conf is_host=false" in one
    assert "--local-addr 10.0.0.9" in one and "--max-restarts 3" in one
    assert "--node-rank 1" in machine.lines("before")[0] and "--meet-port 31001" in machine.lines("before")[0]


@pytest.mark.parametrize(("stem", "variable"), [("davinci", "HCCL"), ("nvidia", "NCCL")])
def test_the_interface_towards_the_other_nodes_is_told_to_every_library(machine, stem, variable):
    machine.devices(stem, 8)
    machine.run(TORCHRUN, *PROGRAM, NNODES="2", NODE_RANK="0", MASTER_ADDR="10.0.0.9")
    assert {"GLOO_SOCKET_IFNAME=eth7", f"{variable}_SOCKET_IFNAME==eth7"} <= set(machine.lines("env"))
    assert "is_host=true" in machine.lines("agent")[0]


def test_what_the_user_has_set_stays(machine):
    names = {"GLOO_SOCKET_IFNAME": "ib0", "HCCL_SOCKET_IFNAME": "ib", "HCCL_EXEC_TIMEOUT": "99", "OMP_NUM_THREADS": "4"}
    machine.devices("davinci", 8)
    machine.run(TORCHRUN, *PROGRAM, NNODES="2", NODE_RANK="0", MASTER_ADDR="h", **names)
    assert {f"{name}={value}" for name, value in names.items()} <= set(machine.lines("env"))


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        ((), {}, "what shall run?"),
        (("--learning-rate", "1"), {}, "--learning-rate: there is no such flag"),
        (("--nnodes",), {}, "--nnodes needs a value"),
        (PROGRAM, {"NNODES": "two"}, "NNODES = two: expected a whole number"),
        (PROGRAM, {"NNODES": "2"}, "set NODE_RANK on each node, from 0 to 1"),
        (PROGRAM, {"NNODES": "2", "NODE_RANK": "1"}, "set MASTER_ADDR to an address of node 0"),
        (PROGRAM, {"PLATFORM": "tpu"}, "PLATFORM = tpu: there are cpu, cuda and npu"),
        (PROGRAM, {"PLATFORM": "npu"}, "PLATFORM = npu has 0 devices here"),
        (PROGRAM, {"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE = 0"),
        (PROGRAM, {"FAKE_LACKS_TORCH": "1"}, "torch is not installed there"),
    ],
)
def test_a_wrong_launch_says_what_to_set_and_starts_nothing(machine, words, environment, message):
    status, output = machine.run(TORCHRUN, *words, **environment)
    assert status == 2 and message in output
    assert machine.lines("agent") == []


def test_more_ranks_than_devices_are_refused(machine):
    status, output = machine.devices("davinci", 8).run(TORCHRUN, *PROGRAM, NPROC_PER_NODE="16")
    assert status == 2 and "there are 8 npu devices" in output


def test_nodes_that_do_not_fit_start_nothing(machine):
    assert machine.run(TORCHRUN, *PROGRAM, FAKE_REFUSES="1")[0] == 1
    assert machine.lines("agent") == []


def test_the_programs_status_is_the_launchers(machine):
    assert machine.run(TORCHRUN, *PROGRAM, FAKE_STATUS="7")[0] == 7


@pytest.mark.long
def test_a_port_in_use_is_found_before_anything_starts(machine):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        port = str(server.getsockname()[1])
        names = {"PYTHON": sys.executable, "MASTER_PORT": port, "PYTHONPATH": str(ROOT), "NPROC_PER_NODE": "1"}
        status, output = machine.run(TORCHRUN, "-m", "no.such.module", **names)
    assert status == 1 and f"MASTER_PORT = {port} on 127.0.0.1: in use" in output and "ss -ltnp" in output
    assert "no.such.module" not in output


def wait_for(machine: Machine, kind: str, count: int = 1) -> None:
    deadline = time.monotonic() + 30
    while len(machine.lines(kind)) < count:
        assert time.monotonic() < deadline, machine.log.read_text()
        time.sleep(0.02)


def test_usr1_reaches_the_ranks_and_not_their_launcher(machine):
    process = machine.start(TORCHRUN, *PROGRAM, FAKE_RANK=RANK, FAKE_STATUS="5")
    wait_for(machine, "rank")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30 * crowding()) == 5
    assert machine.lines("saved") == ["saved"]


SLURM = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "4711", "NPROC_PER_NODE": "8"}
JOBS = sorted(path.name for path in (ROOT / "launch" / "slurm").glob("*.sbatch"))


@pytest.mark.parametrize("job", JOBS)
def test_a_slurm_job_starts_one_launcher_a_node(machine, job):
    machine.devices("nvidia" if job == "nvidia.sbatch" else "davinci", 8)
    status, output = machine.run(f"launch/slurm/{job}", *PROGRAM, SLURM_SUBMIT_DIR=str(machine.root), **SLURM)
    assert status == 0, output
    [srun] = machine.lines("srun")
    assert "--nodes 2 --ntasks 2 --ntasks-per-node 1" in srun
    agents = machine.lines("agent")
    port = 15000 + 4711 % 8000 * 2
    assert len(agents) == 2 and all(f"--rdzv-endpoint first:{port} " in agent for agent in agents)
    assert sorted("is_host=true" in agent for agent in agents) == [False, True]
    assert all("--rdzv-id 4711-0 " in agent and "--config a file.yaml" in agent for agent in agents)
    assert machine.lines("scontrol") == ["show hostnames n[1-2]"]


@pytest.mark.parametrize("job", JOBS)
def test_a_slurm_job_asks_for_what_it_needs(job):
    text = (ROOT / "launch" / "slurm" / job).read_text()
    for directive in ("--signal=B:USR1@300", "--requeue", "--open-mode=append", "--ntasks-per-node=1", "--exclusive"):
        assert f"#SBATCH {directive}\n" in text
    devices = {"npu_a2.sbatch": "npu:8", "npu_a3.sbatch": "npu:16", "nvidia.sbatch": "gpu:8"}[job]
    assert f"#SBATCH --gres={devices}\n" in text and f":-{devices.partition(':')[2]}" in text


def test_a_job_that_must_leave_saves_and_goes_back_into_the_queue(machine):
    machine.devices("davinci", 8)
    names = SLURM | {"SLURM_SUBMIT_DIR": str(machine.root), "FAKE_RANK": RANK}
    process = machine.start("launch/slurm/npu_a2.sbatch", *PROGRAM, **names)
    wait_for(machine, "rank", 2)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=30 * crowding())
    assert process.returncode == 0, output
    assert machine.lines("saved") == ["saved", "saved"]
    assert machine.lines("scontrol")[-1] == "requeue 4711"
    assert "asked for a checkpoint" in output


def test_a_job_that_fails_by_itself_does_not_come_back(machine):
    machine.devices("davinci", 8)
    names = SLURM | {"SLURM_SUBMIT_DIR": str(machine.root), "FAKE_STATUS": "3"}
    assert machine.run("launch/slurm/npu_a2.sbatch", *PROGRAM, **names)[0] == 3
    assert not any("requeue" in line for line in machine.lines("scontrol"))


def test_a_slurm_job_outside_the_source_or_without_a_program_says_how_it_is_used(machine, tmp_path):
    for words, place in (((), machine.root), (PROGRAM, tmp_path)):
        names = SLURM | {"SLURM_SUBMIT_DIR": str(place)}
        status, output = machine.run("launch/slurm/npu_a2.sbatch", *words, **names)
        assert status != 0 and ("usage" in output or "job.sh" in output)
        assert machine.lines("srun") == []


def test_nothing_in_a_launch_script_is_a_setting_of_the_run():
    names = {name for name in knobs(Config) if not name.startswith(("model.path", "run."))}
    for script in [*ROOT.glob("launch/*.sh"), *ROOT.glob("launch/slurm/*")]:
        text = script.read_text()
        assert [name for name in names if name in text] == [], script.name
