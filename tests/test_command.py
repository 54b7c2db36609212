"""The command spmd-rl, and what a wheel holds."""

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from needs import need_programs
from spmd_rl.__main__ import RANKS, TOOLS, main, split_torchrun, usage
from spmd_rl.config.loading import load_config, load_dataset_config
from spmd_rl.config.shipped import find_file, folder, shipped_names
from spmd_rl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]


def test_torchruns_options_go_to_torchrun_with_their_values():
    words = ["--nproc_per_node", "2", "--config", "a.yaml", "--nnodes=2", "--train.steps", "3", "--standalone"]
    assert split_torchrun(words) == (
        ["--config", "a.yaml", "--train.steps", "3"],
        ["--nproc_per_node", "2", "--nnodes=2", "--standalone"],
    )


def test_the_usage_names_every_program_and_what_is_shipped():
    assert all(name in usage() for name in (*RANKS, *TOOLS, "gsm8k", "demo_smollm2_cpu"))


def test_another_program_is_refused_with_the_nearest(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["spmd-rl", "evalute"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "did you mean evaluate?" in capsys.readouterr().err


def test_every_tool_of_the_command_is_shipped():
    assert all((folder("tools") / f"{tool}.py").is_file() for tool, _ in TOOLS.values())


PRINTING = {"help": ["help"], "plot": ["plot", "{}", "--text"], "from_mindspeed": ["from_mindspeed", "{}/trl.yaml"]}


@pytest.mark.parametrize("words", PRINTING.values(), ids=PRINTING)
def test_a_reader_that_has_seen_enough_ends_what_prints_without_a_word(words, tmp_path):
    rows = [{"step": step, "time": step, "grpo/rewards/mean": step / 10} for step in range(1, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "trl.yaml").write_text("model_name_or_path: m\nbeta: 0.0\nnum_generations: 4\n")
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "spmd_rl", *(word.format(tmp_path) for word in words)]
    done = subprocess.run(command, cwd=ROOT, stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert done.returncode == -signal.SIGPIPE and "Broken pipe" not in done.stderr, done.stderr


@pytest.mark.parametrize("named", ["gsm8k", "gsm8k.yaml", "configs/datasets/gsm8k.yaml"])
def test_a_shipped_data_set_is_found_from_anywhere(named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dataset = load_dataset_config(named)
    assert (dataset.source, dataset.name, dataset.prompt_column) == ("openai/gsm8k", "gsm8k", "question")
    own = load_dataset_config(f"{named}:data/copy")
    assert (own.source, own.prompt_column) == ("data/copy", "question")


def test_what_is_there_comes_before_what_is_shipped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("gsm8k").mkdir()
    assert load_dataset_config("gsm8k").source == "gsm8k"
    Path("gsm8k.yaml").write_text("source: mine.jsonl\n")
    assert load_dataset_config("gsm8k.yaml").source == "mine.jsonl"


def test_a_shipped_configuration_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for named in ("demo_smollm2_cpu", "demo_smollm2_cpu.yaml", "configs/demo_smollm2_cpu.yaml"):
        assert load_config(["--config", named]).run.name == "demo"
    assert find_file("no_such_one.yaml", ("",)) is None
    of_an_evaluation = folder("configs") / "evaluation" / "lab_smollm2_cpu.yaml"
    assert find_file("evaluation/lab_smollm2_cpu", ("", "evaluation")) == of_an_evaluation
    with pytest.raises(ConfigError, match="no_such_one"):
        load_config(["--config", "no_such_one.yaml"])


@pytest.mark.slow
def test_a_wheel_holds_configurations_templates_and_tools(tmp_path):
    build = [sys.executable, "-c", "from setuptools.build_meta import build_wheel; build_wheel('dist')"]
    copy = tmp_path / "copy"
    need_programs("git")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    (copy / "dist").mkdir()
    subprocess.run(build, cwd=copy, check=True, capture_output=True)
    [wheel] = (copy / "dist").glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    beside = [name for name in listed.splitlines() if name.startswith(("configs/", "tools/"))]
    wanted = {f"spmd_rl/{name}" for name in beside if name.endswith((".yaml", ".jinja", ".json", ".py"))}
    of_a_checkout = tuple(f"spmd_rl/tools/{name}/" for name in ("bench_peers", "bringup", "npu_contract"))
    assert {name for name in wanted - held if not name.startswith(of_a_checkout)} == set()
    assert {"spmd_rl/configs/templates/qwen.jinja", "spmd_rl/configs/datasets/gsm8k.yaml"} <= held
    assert all(f"spmd_rl/{tool}" in held for tool in ("tools/plot_run.py", "tools/convert_checkpoint.py"))
    assert shipped_names("datasets") and not any(name.startswith(("configs/", "tools/", "tests/")) for name in held)
