"""Test what the source must not do with what comes from outside, read from the source alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted([*(ROOT / "spmd_rl").rglob("*.py"), *(ROOT / "tools").rglob("*.py")])

PICKLES = ("pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
OBJECTS = ("all_gather", "gather", "broadcast", "scatter", "send", "recv")
# What each of these may do all the same, and why.
ALLOWED = {
    ("spmd_rl/patches/checkpoint_pickles.py", "pickle"): "the restricted reader that takes the place of torch's own",
    ("spmd_rl/patches/checkpoint_writes.py", "pickle"): "between a process and its own fork, through memory of theirs",
    ("spmd_rl/weights/files/checkpoint_writer.py", "pickle"): "writes the index of a checkpoint, whose format it is",
    ("spmd_rl/config/yaml_file.py", "yaml.load"): "with a loader that is a SafeLoader",
    ("tools/bench_peers/trl_grpo.py", "all_gather_object"): "runs another program, to compare with it",
}


def uses(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Return what a file does that could carry out something from outside: a name, and the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            for name in [module] if module else [alias.name for alias in node.names]:
                if name.split(".")[0] in PICKLES:
                    yield "pickle", node.lineno
        if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::"):
            yield "listening on every interface", node.lineno
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        options = {option.arg: ast.unparse(option.value) for option in node.keywords}
        last = called.rpartition(".")[2]
        if called in ("eval", "exec", "compile", "os.system", "os.popen", "pty.spawn"):
            yield called, node.lineno
        if options.get("shell") == "True" or last in ("getoutput", "getstatusoutput", "create_subprocess_shell"):
            yield "a shell", node.lineno
        if called == "torch.load" and options.get("weights_only") != "True":
            yield "torch.load", node.lineno
        if last in ("unsafe_load", "full_load", "load_all") or called == "yaml.load":
            yield "yaml.load", node.lineno
        if options.get("allow_pickle") == "True":
            yield "allow_pickle", node.lineno
        if last in {f"{act}_object{s}" for act in OBJECTS for s in ("", "_list")}:
            yield last, node.lineno
        if options.get("trust_remote_code") == "True":
            yield "trust_remote_code", node.lineno
        if last == "score_answer":  # some of reasoning_gym's evaluate what a model has answered
            yield last, node.lineno
        if last == "bind" and node.args and ast.unparse(node.args[0]).startswith("(''"):
            yield "listening on every interface", node.lineno


def test_nothing_from_outside_can_be_carried_out():
    assert len(FILES) > 100
    found = {}
    for path in FILES:
        for use, line in uses(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault((path.relative_to(ROOT).as_posix(), use), []).append(line)
    assert {place: lines for place, lines in found.items() if place not in ALLOWED} == {}
    assert set(ALLOWED) - set(found) == set(), "these need no permission any more"


@pytest.mark.parametrize(
    ("source", "use"),
    [
        ("import pickle", "pickle"),
        ("from cloudpickle import loads", "pickle"),
        ("eval(answer)", "eval"),
        ("subprocess.run(text, shell=True)", "a shell"),
        ("os.system(text)", "os.system"),
        ("torch.load(file)", "torch.load"),
        ("torch.load(file, weights_only=False)", "torch.load"),
        ("yaml.load(text, yaml.Loader)", "yaml.load"),
        ("dist.all_gather_object(everyone, mine)", "all_gather_object"),
        ("dist.broadcast_object_list(names)", "broadcast_object_list"),
        ("AutoConfig.from_pretrained(p, trust_remote_code=True)", "trust_remote_code"),
        ("server.bind(('', 80))", "listening on every interface"),
        ("server.bind(('0.0.0.0', 80))", "listening on every interface"),
    ],
)
def test_each_of_these_is_noticed(source, use):
    assert [found for found, _ in uses(ast.parse(source))] == [use]


def test_what_is_harmless_is_not():
    source = "model.eval(); re.compile('a'); torch.load(f, weights_only=True); self._object(x); bind(('127.0.0.1', 0))"
    assert list(uses(ast.parse(source))) == []
