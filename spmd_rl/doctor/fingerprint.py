"""Compare what must be the same on every node, in a form that is small and says where it differs."""

import hashlib
import json
import platform
from pathlib import Path

from spmd_rl.config import loading as load
from spmd_rl.config.config import Config
from spmd_rl.doctor.finding import Finding

PACKAGE = Path(__file__).resolve().parents[1]
COMPARED = {"code": "file", "config": "setting", "versions": "package", "machine": "property"}
LISTED = 4


def code(package: Path = PACKAGE) -> dict[str, str]:
    """File of the program -> hash of what is in it."""
    files = sorted(package.rglob("*.py"))
    return {file.relative_to(package).as_posix(): _hash(file.read_bytes()) for file in files}


def settings(config: Config) -> dict[str, str]:
    """Every setting -> its value, as text."""
    return {name: repr(value) for name, value in load.settings(config).items()}


def python() -> dict[str, str]:
    """Return what else must be equal for ranks to understand each other."""
    return {"python": platform.python_version(), "architecture": platform.machine()}


def digest(facts: dict[str, str]) -> str:
    """One short hash of many facts."""
    return _hash(json.dumps(facts, sort_keys=True).encode())


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def compare(nodes: list[dict[str, dict[str, str]]]) -> list[Finding]:
    """Every node's facts, by kind (see COMPARED), against node 0's."""
    found = []
    for kind, noun in COMPARED.items():
        first = nodes[0].get(kind, {})
        differing = [
            (node, name)
            for node, facts in enumerate(nodes)
            for name in sorted(first.keys() | facts.get(kind, {}).keys())
            if first.get(name) != facts.get(kind, {}).get(name)
        ]
        if not differing:
            if first:
                found.append(Finding(f"same {kind}", f"{digest(first)} on all {len(nodes)} nodes", "ok"))
            continue
        who = sorted({node for node, _ in differing})
        words = [_difference(kind, noun, name, nodes, node) for node, name in differing[:LISTED]]
        more = f"; and {len(differing) - LISTED} more" if len(differing) > LISTED else ""
        fix = {
            "code": "copy or check out the same source on every node (node 0's is taken as right)",
            "config": "give every node the same --config file and the same words after it",
            "versions": "install the same requirements on every node: bash launch/setup_env.sh",
            "machine": "start the same environment and the same number of ranks on every node",
        }[kind]
        places = f"node {who[0]}" if len(who) == 1 else "nodes " + ", ".join(map(str, who))
        found.append(Finding(f"same {kind}", "; ".join(words) + more, "stop", fix, places))
    return found


def _difference(kind: str, noun: str, name: str, nodes: list[dict[str, dict[str, str]]], node: int) -> str:
    here, there = nodes[0].get(kind, {}).get(name), nodes[node].get(kind, {}).get(name)
    if here is None or there is None:
        return f"{noun} {name} is only on node {node if here is None else 0}"
    if kind == "code":
        return f"{noun} {name} differs on node {node}"
    return f"{noun} {name} = {here} on node 0, {there} on node {node}"
