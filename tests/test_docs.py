"""Test what README and docs tell a reader to type: files and modules that are there, settings, tools that answer."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_rl import evaluate
from spmd_rl.__main__ import split_torchrun
from spmd_rl.chat import __main__ as chat
from spmd_rl.config.loading import load, load_config
from spmd_rl.config.serving import ChatConfig, EvaluateConfig
from spmd_rl.plan import __main__ as plan

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAM = re.compile(r"\bspmd_rl[. ](grpo|ppo|evaluate|chat|plan)\b(.*)")
OWN_FILES = re.compile(r"\.\.\.|\bFILE\b|\bmine\.yaml\b|\[--|--help")
"""Of a reader's: commands about them say how it is done, and can't be tried."""

ALONE = re.compile(
    r"python (tools/(plot_run|find_insights|bench_plan)\.py|-m spmd_rl\.rewards\.audit|-m tools\.bringup\.integers)\b"
    r"|.* --help$"
)
"""Start no ranks, and need nothing but the source and a run that has ended."""


def commands() -> list[tuple[str, str]]:
    """Return (page, command) of every line of code that starts a program of this project."""
    found = []
    for page in PAGES:
        inside = re.findall(r"```\w*\n(.*?)```", page.read_text(), re.DOTALL) + re.findall(
            r"`([^`\n]+)`", page.read_text()
        )
        lines = [line for text in inside for line in text.replace("\\\n", " ").splitlines()]
        start = r"(?:\w+=\S+ )*(?:python3?|bash|torchrun|sbatch)\b.*\b(?:spmd_rl|tools|launch)\b"
        found += [(page.name, line.partition(" #")[0].strip()) for line in lines if re.match(start, line)]
    return found


def calls() -> list[tuple[str, str, list[str]]]:
    """Return (page, program, the program's own words) of commands whose files are ours."""
    found: dict[tuple[str, ...], str] = {}
    for page, command in commands():
        source = next(path for path in PAGES if path.name == page).read_text()
        for name, value in reversed(re.findall(r'^(\w+)="(.*)"$', source, re.MULTILINE)):
            command = command.replace(f"${name}", value)
        called = PROGRAM.search(command)
        if called and called[2].strip() and not OWN_FILES.search(called[2]):
            found.setdefault((called[1], *split_torchrun(shlex.split(called[2]))[0]), page)
    return [(page, program, words) for (program, *words), page in found.items()]


def test_the_docs_have_commands():
    assert len(commands()) > 40


def test_every_file_and_module_that_is_started_is_there():
    missing = []
    for page, command in commands():
        for module in re.findall(r"-m (spmd_rl[\w.]*)", command):
            path = ROOT / module.replace(".", "/")
            missing += [(page, command)] * (
                not path.with_suffix(".py").exists() and not (path / "__main__.py").exists()
            )
        for file in re.findall(r"(?<![\w/.])((?:tools|launch|configs)/[\w/.-]+\.\w+)", command):
            missing += [(page, command)] * (not (ROOT / file).exists())
    assert missing == []


def test_every_test_that_is_named_is_there():
    wrong = []
    for page in PAGES:
        file = ""
        for named, test in re.findall(r"`(tests/[\w/]+\.py)?::(test_\w+)`", page.read_text()):
            file = named or file  # `::test_...` is of the file before it
            source = (ROOT / file).read_text() if (ROOT / file).is_file() else ""
            wrong += [(page.name, file, test)] * (f"def {test}(" not in source)
    assert wrong == []


def test_every_setting_that_is_named_is_one():
    from spmd_rl.config.config import Config
    from spmd_rl.config.fields import NAME, knobs
    from spmd_rl.config.serving import ChatConfig, EvaluateConfig

    known = {name for config in (Config, EvaluateConfig, ChatConfig) for name in knobs(config)}
    sections = {name.rpartition(".")[0] for name in known}
    wrong = []
    for page in PAGES:
        for option in re.findall(r"--([a-z]+\.[a-z_.-]*[a-z])", page.read_text()):
            name = re.sub(r"^(reward\.models|rollout\.models)\.[\w-]+", rf"\1.{NAME}", option.replace("-", "_"))
            wrong += [(page.name, option)] * (
                name not in known and name not in {*sections, "section.key", "section.setting"}
            )
    assert wrong == []


def test_the_settings_of_every_command_are_taken_by_its_program():
    kinds = {"evaluate": (EvaluateConfig, evaluate.NEEDED), "chat": (ChatConfig, chat.NEEDED)}
    found = calls()
    assert len(found) > 30
    for page, program, words in found:
        try:
            if program in kinds:
                load(kinds[program][0], words, kinds[program][1], "")
            elif program != "plan":
                load_config(words)
        except ValueError as error:
            pytest.fail(f"{page}: {program} {shlex.join(words)}\n{error}")


@pytest.mark.slow
@pytest.mark.parametrize("words", [words for _, program, words in calls() if program == "plan"], ids=" ".join)
def test_every_plan_that_is_shown_is_made(words, smollm2, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    plan.main([*words, *(["--model.path", smollm2] if "demo_smollm2" in words[1] else [])])
    assert "GiB" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "tool", sorted(path.name for path in (ROOT / "tools").glob("*.py") if "main()" in path.read_text())
)
def test_every_tool_says_how_it_is_used(tool):
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / tool, "--help"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0 and "usage" in done.stdout, done.stderr[-2000:]


def alone() -> list[str]:
    """Return the commands that are carried out as they are written, one of those that differ only in the run's name."""
    found = {re.sub(r"runs/[\w-]+", "runs/_", command): command for _, command in commands() if ALONE.match(command)}
    return list(found.values())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Make a directory with this source and each run that the pages name."""
    root = tmp_path_factory.mktemp("reader")
    for name in ("configs", "launch", "spmd_rl", "tools"):
        (root / name).symlink_to(ROOT / name)
    for run in {run for command in alone() for run in re.findall(r"runs/[\w-]+", command)}:
        (root / run / "samples").mkdir(parents=True)
        settings = {"model": {"path": "model"}, "reward": {"rules": {"acc": 1.0}}}
        (root / run / "config.yaml").write_text(json.dumps(settings))
        rows = [{"step": n, "grpo/rewards/mean": n / 4, "timing/all": 2.0, "timing/update": 1.0} for n in (1, 2)]
        (root / run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sample = {
            "step": 1,
            "id": 0,
            "prompt": "2+3?",
            "response": "5",
            "reward": 1.0,
            "cause": "correct",
            "answer": "5",
        }
        (root / run / "samples" / "step_000001.jsonl").write_text(json.dumps(sample) + "\n")
    return root


@pytest.mark.slow
@pytest.mark.parametrize("command", alone())
def test_what_needs_no_ranks_is_carried_out_as_it_is_written(place, command):
    python = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=place,
        env=os.environ | {"PATH": python},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout + done.stderr
    # An audit whose grades differ from those of the run ends with 1.
    assert done.returncode in (0, int("audit" in command)) and "Traceback" not in said and done.stdout, said[-3000:]
