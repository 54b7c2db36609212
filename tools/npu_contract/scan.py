"""Our own source against the wheels: imports, calls of operators, names of torch.npu, variables of the environment."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tools.npu_contract.wheel import Wheel

PACKAGES = {"torch_npu": "torch_npu", "vllm_ascend": "vllm_ascend", "megatron": "megatron_core"}
"""Name that is imported -> the wheel that has it."""
DOCUMENTED = frozenset(
    "HCCL_SOCKET_IFNAME HCCL_IF_IP HCCL_IF_BASE_PORT HCCL_HOST_SOCKET_PORT_RANGE HCCL_NPU_SOCKET_PORT_RANGE "
    "HCCL_OP_EXPANSION_MODE ASCEND_HOME_PATH ASCEND_CUSTOM_OPP_PATH".split()
)
"""Variables that CANN alone reads: https://www.hiascend.com/document (environment variable reference)."""
_VARIABLE = re.compile(
    r"^(?:HCCL|P2P_HCCL|LCCL|ASCEND|VLLM_ASCEND|TORCH_NPU|TORCH_HCCL|PYTORCH_NPU|ACL)_[A-Z0-9_]+$"
    r"|^(?:TASK_QUEUE_ENABLE|CPU_AFFINITY_CONF|MULTI_STREAM_MEMORY_REUSE)$"
)
LATER = {"TORCH_NPU_DEVICE_CAPABILITY": "2.9.0.post2"}
"""Variables that we set only where torch_npu is at least of this version."""
_OPERATOR = re.compile(r"(?:torch_npu|torch\.ops\.npu)\.((?:_?npu_|get_npu_)\w+)$")


def scan(root: Path, wheels: Mapping[str, Wheel]) -> tuple[int, list[str]]:
    """Return how many uses were looked at, and what is wrong with some: one line each, by file and line."""
    uses, wrong = 0, []
    for file in sorted(root.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node, what, problem in _uses(tree, wheels):
            uses += 1
            if problem:
                wrong.append(f"{file.relative_to(root)}:{node.lineno}: {what}: {problem}")
    return uses, wrong


def _uses(tree: ast.Module, wheels: Mapping[str, Wheel]) -> Iterator[tuple[ast.stmt | ast.expr, str, str]]:
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, one.name, _import(wheels, one.name, None)) for one in node.names if _ours(one.name))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level and _ours(node.module):
            for one in node.names:
                yield node, f"{node.module}.{one.name}", _import(wheels, node.module, one.name)
        elif isinstance(node, ast.Call) and (said := _OPERATOR.match(_dotted(node.func))):
            yield node, said[1], _call(wheels["torch_npu"], said[1], node)
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            dotted = _dotted(node)
            if dotted.startswith("torch.npu."):
                yield node, dotted, _runtime(wheels["torch_npu"], dotted.split(".")[2:])
            elif (said := _OPERATOR.match(dotted)) and id(node) not in called:
                yield node, said[1], "" if said[1] in wheels["torch_npu"].operators else "no such operator"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _VARIABLE.match(node.value):
                yield node, node.value, _variable(wheels, node.value)
            elif node.value.startswith("torch:npu."):  # platforms name functions that are looked up later
                yield node, node.value, _runtime(wheels["torch_npu"], node.value.split(".")[1:])


def _ours(module: str) -> bool:
    return module.split(".")[0] in PACKAGES


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _import(wheels: Mapping[str, Wheel], module: str, name: str | None) -> str:
    package = PACKAGES[module.split(".")[0]]
    return "" if wheels[package].resolves(module, name) else f"not in {wheels[package].path.name}"


def _call(wheel: Wheel, operator: str, node: ast.Call) -> str:
    schemas = wheel.operators.get(operator)
    if not schemas:
        return "" if wheel.resolves("torch_npu", operator) else "no such operator"
    if any(isinstance(one, ast.Starred) for one in node.args) or any(one.arg is None for one in node.keywords):
        return ""
    keywords = {str(one.arg) for one in node.keywords}
    misfits = [one.misfit(len(node.args), keywords) for one in schemas]
    return "" if "" in misfits else "; ".join(misfits)


def _runtime(wheel: Wheel, parts: list[str]) -> str:
    if parts[0] in wheel.exported("torch_npu/npu/__init__.py") or wheel.resolves("torch_npu.npu", parts[0]):
        inside = len(parts) > 1 and wheel.module(f"torch_npu.npu.{parts[0]}") is not None
        if not inside or wheel.resolves(f"torch_npu.npu.{parts[0]}", parts[1]):
            return ""
    return "not in torch.npu"


def _variable(wheels: Mapping[str, Wheel], name: str) -> str:
    torch_npu = wheels["torch_npu"]
    if name in DOCUMENTED or name.encode() in torch_npu.library:
        return ""
    if any(name in wheels[one].sources for one in ("torch_npu", "vllm_ascend")):
        return ""
    version = torch_npu.path.name.split("-")[1]
    if name in LATER and version < LATER[name]:
        return ""
    return "no wheel reads it"
