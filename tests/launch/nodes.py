"""Several "nodes" on one machine: namespaces of network, processes and host name, joined by a bridge."""

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from deadlines import crowding
from needs import need_programs

ROOT = Path(__file__).resolve().parents[2]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


class Nodes:
    """`count` nodes with the addresses 10.77.0.1, 10.77.0.2, ... on one link.

    Each has its own loopback and eth0 (a veth pair into a bridge, which is in a namespace of its own), its own process
    numbers, so that no rank can read the memory of another node's, and its own host name. They share the file system.
    """

    def __init__(self, count: int):
        self.tag = f"t{os.getpid()}{secrets.token_hex(2)}"
        self.count = count
        self.running: list[subprocess.Popen] = []
        self.switch = f"{self.tag}s"
        self.made: list[str] = []

    def __enter__(self) -> "Nodes":
        try:
            self._namespace(self.switch)
            ip("-n", self.switch, "link", "add", "br0", "type", "bridge")
            ip("-n", self.switch, "link", "set", "br0", "up")
            for node in range(self.count):
                name = f"{self.tag}n{node}"
                self._namespace(name)
                ip("-n", self.switch, "link", "add", f"v{node}", "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("-n", self.switch, "link", "set", f"v{node}", "master", "br0", "up")
                ip("-n", name, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
                # The kernel gives up on a peer that does not answer after seconds, as against a quarter of an hour.
                ip("netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_retries2=3")
                for device in ("lo", "eth0"):
                    ip("-n", name, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            self.__exit__()
            why = getattr(error, "stderr", None) or str(error)
            pytest.skip(f"no network namespaces here: {why.strip()}")
        return self

    def _namespace(self, name: str) -> None:
        ip("netns", "add", name)
        self.made.append(name)

    def __exit__(self, *_: object) -> None:
        for process in self.running:
            process.kill()  # all of its node goes with it
            process.wait(30)
        for name in self.made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    @staticmethod
    def address(node: int) -> str:
        return f"10.77.0.{node + 1}"

    def start(self, node: int, command: list[str], directory: Path = ROOT, **environment: str) -> subprocess.Popen:
        """A command on a node, as its first process: when it is killed, everything on the node is."""
        inside = f'hostname node{node}; exec "$@"'
        process = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                f"{self.tag}n{node}",
                "unshare",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "--uts",
            ]
            + ["bash", "-c", inside, "node", *command],
            cwd=directory,
            env=os.environ
            | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
            | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.running.append(process)
        return process

    def launch(self, node: int, words: list[str], directory: Path = ROOT, **environment: str) -> subprocess.Popen:
        """launch/torchrun.sh on a node, one rank, the first node as the master."""
        names = {
            "NNODES": str(self.count),
            "NODE_RANK": str(node),
            "MASTER_ADDR": self.address(0),
            "NPROC_PER_NODE": "1",
            "PLATFORM": "cpu",
            "WAIT_SECONDS": "40",
            "PYTHON": sys.executable,
        }
        return self.start(node, ["bash", f"{ROOT}/launch/torchrun.sh", *words], directory, **(names | environment))

    def cut(self, node: int) -> None:
        """Pull the node's cable: packets are lost, and nobody is told."""
        ip("-n", self.switch, "link", "set", f"v{node}", "down")


def require_namespaces() -> None:
    """Skip the test with the reason where nodes cannot be made."""
    need_programs("ip", "unshare")
    if os.geteuid():
        pytest.skip("network namespaces need root")


def ended(processes: list[subprocess.Popen], seconds: float) -> list[str]:
    """Return what each printed, when all have ended: in so many seconds of a machine that does nothing else."""
    said = []
    for process in processes:
        try:
            said.append(process.communicate(timeout=seconds * crowding())[0])
        except subprocess.TimeoutExpired as late:
            output = (late.output or b"").decode(errors="replace")
            raise AssertionError(f"{' '.join(process.args)}\nhas not ended; it said:\n{output[-4000:]}") from None
    return said
