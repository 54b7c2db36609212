"""The house's layers and doors, read from the source alone: nothing is imported."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "spmd_rl"

# From the top down; what stands in one row does not import each other.
LAYERS = (
    ("__main__",),
    ("api", "grpo", "ppo", "plan", "evaluate", "chat", "verify_resume"),
    ("runs",),
    ("serve", "analysis"),
    ("program", "doctor"),
    ("runtime", "testing"),
    ("controller", "worker"),
    ("runlog", "evaluation", "training", "rollout"),
    ("estimate",),
    ("weights",),
    ("algorithms", "rewards"),
    ("data",),
    ("health",),
    ("distributed",),
    ("patches",),
    ("config",),
    ("platforms",),
    ("models",),
    ("errors",),
)
# Library -> where it may be imported; a name that ends in / is a folder.
DOORS = {
    "megatron": ("training/", "patches/"),
    "vllm": ("rollout/", "patches/"),
    "vllm_ascend": ("rollout/", "patches/"),
    "torch_npu": ("platforms/npu.py",),
    "transformers": ("data/", "training/vision.py", "patches/vllm_images.py"),
    "datasets": ("data/sources/tables.py",),
    "pyarrow": ("data/sources/tables.py", "data/sources/prepared.py"),
    "reasoning_gym": ("data/sources/tasks.py",),
    "safetensors": ("weights/",),
    "numba": ("platforms/cpu_row_sums.py", "platforms/cpu_gumbel.py"),
    "tyro": ("config/",),
    "yaml": ("config/",),
    "math_verify": ("rewards/",),
    "huggingface_hub": ("models/hub.py",),
    "wandb": ("runlog/sinks.py",),
    "swanlab": ("runlog/sinks.py",),
    "tensorboard": ("runlog/sinks.py",),
    "rich": ("runlog/run_log.py", "runlog/console.py", "evaluation/report.py"),
    "plotext": ("analysis/curves.py",),
    "matplotlib": ("analysis/figures.py", "analysis/axes.py", "analysis/memory_picture.py", "analysis/glyphs.py"),
    "ray": (),
}
# These do not import torch, and nothing that they import on loading does: command lines are answered, and graders'
# processes started, without it.
TORCH_FREE = ("errors", "models", "config", "data", "rewards", "estimate", "plan")
# These decide and tell; what they tell the ranks through may use torch.
TORCH_FREE_THEMSELVES = (
    "controller",
    "runlog",
    "evaluation",
    "analysis",
    "grpo",
    "ppo",
    "evaluate",
    "chat",
    "serve",
    "verify_resume",
    "runs",
)

FILES = sorted(PACKAGE.rglob("*.py"))
PLACE = {path: path.relative_to(PACKAGE).as_posix() for path in FILES}


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    on_loading: bool
    """At module level: it happens when the file is imported."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> list[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return list(_imports(tree.body, path, on_loading=True))


def _imports(body: list[ast.stmt], path: Path, on_loading: bool) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, on_loading)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                inside = name_of(path).split(".")
                package = inside if path.name == "__init__.py" else inside[:-1]
                base = ".".join(package[: len(package) - node.level + 1])
                module = f"{base}.{module}" if module else base
            yield Import(module, node.lineno, on_loading)
            # `from spmd_rl.weights import layout` imports the module spmd_rl.weights.transfer.boxes.
            for alias in node.names:
                if module.startswith("spmd_rl") and is_module(f"{module}.{alias.name}"):
                    yield Import(f"{module}.{alias.name}", node.lineno, on_loading)
        else:
            deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(node)
            for _, value in ast.iter_fields(node):
                if isinstance(value, list):
                    inner = [item for item in value if isinstance(item, ast.stmt)]
                    inner += [child for item in value if isinstance(item, ast.ExceptHandler) for child in item.body]
                    inner += [child for item in value if isinstance(item, ast.match_case) for child in item.body]
                    yield from _imports(inner, path, on_loading and not deferred)
            yield from _called_imports(node)


def _called_imports(node: ast.stmt) -> Iterator[Import]:
    """importlib.import_module("name") and __import__("name")."""
    for call in (part for part in ast.walk(node) if isinstance(part, ast.Call)):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if called in ("import_module", "__import__") and call.args and isinstance(call.args[0], ast.Constant):
            yield Import(str(call.args[0].value), call.lineno, False)


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def layer_of(module: str) -> int | None:
    """Index into LAYERS of a module of ours; None for the package itself."""
    parts = module.split(".")
    if len(parts) == 1:
        return None
    found = [index for index, names in enumerate(LAYERS) if parts[1] in names]
    assert found, f"{module} is in no layer: give {parts[1]} a place in LAYERS"
    return found[0]


IMPORTS = {path: imports(path) for path in FILES}


def complaints(rule) -> list[str]:
    """Run rule(path, import) -> complaint or None over every import of every file."""
    found = []
    for path in FILES:
        for imported in IMPORTS[path]:
            complaint = rule(path, imported)
            if complaint:
                found.append(f"{PLACE[path]}:{imported.line}: {complaint}")
    return found


def test_every_file_has_a_place_in_the_layers():
    assert FILES
    for path in FILES:
        layer_of(name_of(path))


def test_imports_point_down():
    def rule(path: Path, imported: Import) -> str | None:
        if imported.module.split(".")[0] != "spmd_rl":
            return None
        here, there = layer_of(name_of(path)), layer_of(imported.module)
        same_part = name_of(path).split(".")[1:2] == imported.module.split(".")[1:2]
        if here is None or there is None or same_part or here < there:
            return None
        return f"{imported.module} is not below"

    assert complaints(rule) == []


def test_every_library_comes_in_through_its_door():
    def rule(path: Path, imported: Import) -> str | None:
        doors = DOORS.get(imported.module.split(".")[0])
        if doors is None or PLACE[path].startswith(doors):
            return None
        return f"{imported.module} comes in through {' or '.join(doors) or 'no door'}"

    assert complaints(rule) == []


def test_what_rank_0_decides_with_is_free_of_torch():
    def rule(path: Path, imported: Import) -> str | None:
        part = name_of(path).split(".")[1:2]
        if imported.module.split(".")[0] == "torch" and part and part[0] in (*TORCH_FREE, *TORCH_FREE_THEMSELVES):
            return f"imports {imported.module}"
        return None

    assert complaints(rule) == []


def loads(module: str) -> set[str]:
    """Modules of ours that importing `module` loads, parents included."""
    by_name = {name_of(path): path for path in FILES}
    seen: set[str] = set()
    todo = [module]
    while todo:
        name = todo.pop()
        if name in seen or name not in by_name:
            continue
        seen.add(name)
        todo.append(name.rpartition(".")[0])
        todo += [imported.module for imported in IMPORTS[by_name[name]] if imported.on_loading]
    return seen


def test_loading_a_torch_free_part_loads_nothing_that_imports_torch():
    by_name = {name_of(path): path for path in FILES}
    with_torch = {
        name
        for name, path in by_name.items()
        if any(imported.on_loading and imported.module.split(".")[0] == "torch" for imported in IMPORTS[path])
    }
    parts = [name for name in by_name if name.split(".")[1:2] and name.split(".")[1] in TORCH_FREE]
    # What is wrong with the settings is said without waiting for torch, whatever the program.
    parts += [
        "spmd_rl.grpo",
        "spmd_rl.ppo",
        "spmd_rl.evaluate",
        "spmd_rl.chat.__main__",
        "spmd_rl.program",
        "spmd_rl.serve",
    ]
    assert {name: found for name in parts if (found := sorted(loads(name) & with_torch))} == {}


def test_a_run_imports_fault_injection_only_when_it_is_asked_to():
    def rule(path: Path, imported: Import) -> str | None:
        outside = name_of(path).split(".")[1:2] not in (["testing"], ["verify_resume"])
        if outside and imported.on_loading and imported.module.startswith("spmd_rl.testing"):
            return f"{imported.module} is imported on loading"
        return None

    assert complaints(rule) == []


def test_files_and_functions_are_short_and_no_two_files_have_one_name():
    def functions(path: Path) -> Iterator[tuple[str, int]]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{PLACE[path]}: {node.name}", node.end_lineno - node.lineno + 1

    assert {PLACE[path]: n for path in FILES if (n := len(path.read_text(encoding="utf-8").splitlines())) > 400} == {}
    assert {name: lines for path in FILES for name, lines in functions(path) if lines > 80} == {}
    names = [path.name for path in FILES if path.name not in ("__init__.py", "__main__.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_nothing_is_called_utils():
    names = ("utils", "util", "helpers", "common", "misc")
    assert [place for place in PLACE.values() if set(place.removesuffix(".py").split("/")) & set(names)] == []


# What may know one machine from another: its record, the changes to libraries, and the one who examines it.
MACHINES = ("platforms/", "patches/", "doctor/")


def test_no_machine_is_named_outside_its_record():
    """A question such as `device.type == "npu"` belongs into a field of Platform."""
    found = []
    for path in FILES:
        if PLACE[path].startswith(MACHINES):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = isinstance(node, ast.Constant) and node.value in ("npu", "cuda", "hccl", "nccl")
            asks = isinstance(node, ast.Attribute) and ast.unparse(node).endswith(("device.type", "platform.name"))
            compares = isinstance(node, ast.Compare) and "'cpu'" in map(ast.unparse, (node.left, *node.comparators))
            if named or asks or compares:
                found.append(f"{PLACE[path]}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


def verbs(path: Path) -> set[str]:
    """Methods of a file's classes that carry @verb."""
    classes = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    methods = [node for one in classes for node in one.body if isinstance(node, ast.FunctionDef)]
    return {method.name for method in methods if any(ast.unparse(mark) == "verb" for mark in method.decorator_list)}


def test_ranks_and_the_components_of_a_worker_have_the_same_verbs():
    done = {path.name: verbs(path) for path in (PACKAGE / "worker").glob("*.py")}
    assert verbs(PACKAGE / "controller" / "serve_ranks.py") == done.pop("serve_worker.py")
    assert verbs(PACKAGE / "controller" / "ranks.py") == set().union(*done.values())


def test_the_verbs_that_have_names_and_answers_are_those_that_there_are():
    from spmd_rl.config.names import Verb
    from spmd_rl.data.answers import ANSWERS

    told = verbs(PACKAGE / "controller" / "ranks.py") | verbs(PACKAGE / "controller" / "serve_ranks.py")
    assert sorted(Verb) == sorted(told) == sorted(ANSWERS)
