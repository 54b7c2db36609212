"""Test what this project keeps to beside its code's behaviour: a table of laws, types, and nothing that nobody uses."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

MOST_ANY = 485
"""Lines of the package with `Any`: fewer from change to change."""
# What is used from outside: by Megatron-Core, vLLM or torch through a base class or an attribute they read, by name
# (fault injection, wandb), or by a user's rules.
USED_ELSEWHERE = {
    *("layer_number", "attn_mask_type", "attention_type", "attention_dropout", "v_channels", "attention_mask"),
    *("num_tokens", "decoder_input", "inference", "cp_group", "packed_seq", "get_rotary_seq_len", "rotary_pos_emb"),
    *("allreduce", "_postprocess", "dispatch_preprocess", "token_dispatch", "dispatch_postprocess"),
    *("combine_preprocess", "token_combine", "combine_postprocess", "router_replay", "get_replay_topk"),
    *("_loop", "_slow", "_raise", "_corrupt", "_nan", "_disk_full", "sympy_numeric_eq", "allow_internal_format"),
    *("max_refresh", "trace", "__traceback__", "prompt_ids", "generation_config", "pre_tokenizer", "model_type"),
    *("policy_version", "data_size", "__getattr__", "start_time"),
    *("_apply_aux_loss", "_apply_expert_bias", "attach_and_log_load_balancing_loss"),
    *(
        "dual_clip_loss",
        "gspo_loss",
        "rloo_loss",
        "cispo_loss",
        "clipped_value_loss",
    ),  # the table of losses has them as text
}


def test_every_file_of_tests_is_in_the_table_of_laws_once():
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## The laws")[2]
    named = [place for row in table.splitlines() for place in re.findall(r"`(tests/\S+)`", row.partition(" set |")[0])]
    named = [place for place in named if place.endswith("/") or place.endswith(".py")]
    assert [place for place in named if not (ROOT / place).exists()] == []
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert [file for file in files if not any(file.startswith(place) for place in named)] == []


@pytest.mark.long
def test_types_hold_in_what_decides_and_what_travels():
    command = [sys.executable, "-m", "mypy"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


def test_any_is_said_no_more_often_than_before():
    lines = [line for path in (ROOT / "spmd_rl").rglob("*.py") for line in path.read_text().splitlines()]
    assert sum(bool(re.search(r"\bAny\b", line)) for line in lines) <= MOST_ANY


def test_docstrings_say_what_is_done_and_do_not_ask():
    files = [path for place in ("spmd_rl", "tools", "tests", "launch") for path in (ROOT / place).rglob("*.py")]
    asks = re.compile(r'^ *"""(What|Whether|How|Where|Who)\b', re.MULTILINE)
    assert sum(len(asks.findall(path.read_text())) for path in files) < 20


def test_text_files_are_utf_8_whatever_the_terminal_speaks():
    found = []
    for path in [path for place in ("spmd_rl", "tools") for path in (ROOT / place).rglob("*.py")]:
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        for call in calls:
            name = ast.unparse(call.func).rpartition(".")[2]
            mode = " ".join(one.value for one in call.args if isinstance(getattr(one, "value", 0), str))
            text = {"read_text": not call.args, "write_text": len(call.args) == 1, "open": "b" not in mode}
            own = not ast.unparse(call.func).startswith(("os.", "Image."))
            if own and text.get(name) and "encoding" not in [one.arg for one in call.keywords]:
                found.append(f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}")
    assert found == []


CLOCK = r"time\.(?:monotonic|perf_counter|process_time|thread_time|time)(?:_ns)?\(\)"


def timed(text: str) -> list[str]:
    """Return the assertions that compare a clock, or the machine's load; waiting until a deadline is none."""
    measured = re.findall(rf"^ *(\w+) = (?:{CLOCK} - |.* - {CLOCK})", text, re.MULTILINE)
    time = re.compile("|".join([CLOCK, r"[<>].*\b(?:slowdown|crowding)\b", *(rf"\b{name}\b" for name in measured)]))
    asserts = re.findall(r"^ *(assert .*)", text, re.MULTILINE)
    return [line for line in asserts if time.search(re.sub(r"time\.monotonic\(\) < \w+( |,|$)", "", line))]


def test_no_test_asserts_a_time():
    asserted = ["time.monotonic() - started < 3", "late < 5 * slowdown()", "took < 2", "time.time() > x"]
    lines = ["took = time.process_time() - started", *(f"assert {one}" for one in asserted)]
    assert len(timed("\n".join([*lines, 'assert time.monotonic() < deadline and done, "in time"']))) == len(asserted)
    files = (ROOT / "tests").rglob("*.py")
    found = {path.relative_to(ROOT).as_posix(): timed(path.read_text()) for path in files}
    assert {file: lines for file, lines in found.items() if lines} == {}


@pytest.mark.long
def test_nothing_is_there_that_nobody_uses():
    vulture = pytest.importorskip("vulture").Vulture()
    vulture.scavenge([str(ROOT / place) for place in ("spmd_rl", "tools", "tests")], exclude=["*/patches/*"])
    ours = [item for item in vulture.get_unused_code(60) if str(item.filename).startswith(str(ROOT / "spmd_rl"))]
    assert [item.get_report() for item in ours if item.name not in USED_ELSEWHERE] == []
