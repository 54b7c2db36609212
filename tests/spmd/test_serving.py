"""evaluate and chat as a user starts them: the same answers on one rank and on two, from every kind of directory."""

import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

from deadlines import crowding
from spmd.ranks import ROOT, run_program

pytestmark = pytest.mark.engine

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
DEMO = str(ROOT / "configs" / "datasets" / "arithmetic_demo.yaml")
QUESTIONS, SAMPLES = 5, 4


def command(module: str, ranks: int, *words) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *torchrun, "-m", f"spmd_rl.{module}", *map(str, words)]


def evaluate(ranks: int, model, output, *more) -> str:
    """Return what an evaluation says; one rank is started as a user does it."""
    words = ["--model", model, "--benchmark", DEMO, "--limit", QUESTIONS, "--samples", SAMPLES, "--temperature", 0.8]
    words += ["--max-prompt-length", 200, "--max-response-length", 12, "--rollout.cache-gib", 0.02, "--output", output]
    words += ["--platform", "cpu", *more]
    if ranks > 1:
        return run_program("spmd_rl.evaluate", ranks, *words)
    done = subprocess.run(
        command("evaluate", ranks, *words),
        env=ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300 * crowding(),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def evaluations(tiny_models, tmp_path_factory):
    """Two models on two ranks; then the first as a checkpoint on one, against what the two ranks had."""
    from spmd_rl.distributed.layout import TrainLayout
    from spmd_rl.weights.files.convert import to_megatron
    from tiny_models import make_tiny
    from tiny_tokenizer import make_tokenizer

    root = tmp_path_factory.mktemp("evaluations")
    make_tokenizer(make_tiny(root / "other", "qwen2", tied=True, seed=11))
    to_megatron(tiny_models["qwen2-tied"], root / "checkpoint", TrainLayout(2, 2, 1))
    two = evaluate(2, tiny_models["qwen2-tied"], root / "two", "--baseline", root / "other")
    one = evaluate(1, root / "checkpoint", root / "one", "--baseline", root / "two")
    return root, one, two


def lines(file) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_two_ranks_write_what_one_does_and_a_checkpoint_what_its_model_does(evaluations):
    root, *_ = evaluations
    files = [(root / name / "arithmetic_demo.jsonl").read_text() for name in ("one", "two")]
    assert files[0] == files[1]
    found = lines(root / "one" / "arithmetic_demo.jsonl")
    assert [len(line["samples"]) for line in found] == [SAMPLES] * QUESTIONS
    assert len({sample["response"] for line in found for sample in line["samples"]}) > QUESTIONS * SAMPLES // 2
    assert all(re.match(r"What is \d+ \+ \d+\?", line["question"]) for line in found)


def test_an_evaluation_says_what_it_found_and_where_it_is(evaluations):
    root, one, two = evaluations
    summary = json.loads((root / "one" / "summary.json").read_text())
    numbers = summary["benchmarks"]["arithmetic_demo"]
    assert numbers["questions"] == QUESTIONS and summary["ranks"] == 1
    assert {"accuracy", "accuracy_low", "accuracy_high", "pass_at_4", "majority_at_4"} <= numbers.keys()
    assert f"arithmetic_demo: {QUESTIONS} questions x {SAMPLES} samples" in one
    assert f"accuracy         {numbers['accuracy']:.3f}" in one and "pass@4" in one and "majority@4" in one
    assert f"everything is in {root / 'one'}" in one


def test_a_model_is_compared_with_an_earlier_evaluation_and_with_a_second_model(evaluations):
    root, one, two = evaluations
    assert f"won 0, lost 0, tied {QUESTIONS}; McNemar's exact test: p = 1" in one
    assert lines(root / "one" / "changed_arithmetic_demo.jsonl") == []
    assert f"baseline {root / 'other'}" in two and f"against {root / 'other'}: " in two
    model, baseline = (lines(root / "two" / place / "arithmetic_demo.jsonl") for place in (".", "baseline"))
    assert [line["question"] for line in model] == [line["question"] for line in baseline]
    assert model != baseline


CHAT = ["--max-tokens", 8, "--context", 200, "--cache-gib", 0.02, "--platform", "cpu"]


def test_a_piped_chat_on_two_ranks_answers_as_hugging_face_does_and_says_when_the_context_is_full(tiny_models):
    typed = ["hello", "/set max_tokens=6", "again", "x" * 120, "/reset", "hello", "/exit", "not read"]
    done = subprocess.run(
        command("chat", 2, "--model", tiny_models["qwen2-tied"], "--temperature", 0, *CHAT),
        input="\n".join(typed),
        env=ENVIRONMENT,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300 * crowding(),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    history: list[dict] = []
    expected = ""
    for question, tokens in (("hello", 8), ("again", 6)):
        history.append({"role": "user", "content": question})
        answer = greedy(tiny_models["qwen2-tied"], history, tokens)
        history.append({"role": "assistant", "content": answer})
        expected += f"{answer}\n(cut at max_tokens = {tokens}; /set max_tokens=N allows more)\n"
        if question == "hello":
            expected += "(temperature=0, top_p=0.95, top_k=0, min_p=0, max_tokens=6, seed=1)\n"
    said = done.stdout
    assert expected in said
    assert "the context holds 200: /reset begins a new one" in said
    assert "(a new conversation)\n" + greedy(tiny_models["qwen2-tied"], history[:1], 6) + "\n" in said
    assert said.count("(cut at") == 3


def greedy(path: str, messages: list[dict], tokens: int) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = model.generate(prompt, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_ctrl_c_on_a_terminal_stops_the_answer_and_not_the_program(tiny_models):
    """On a real terminal, as the ranks have it under torchrun too: the key, not a signal."""
    ours, theirs = pty.openpty()
    words = ["--model", tiny_models["qwen2-tied"], *CHAT, "--max-tokens", 400, "--context", 512]
    running = subprocess.Popen(
        command("chat", 1, *words), env=ENVIRONMENT, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown = ""

    def wait_for(text: str, since: int = 0) -> int:
        nonlocal shown
        deadline = time.monotonic() + 200
        while text not in shown[since:]:
            assert time.monotonic() < deadline and running.poll() is None, shown
            if select.select([ours], [], [], 1)[0]:
                shown += os.read(ours, 4096).decode(errors="replace")
        return shown.index(text, since) + len(text)

    try:
        at = wait_for("\n> ")
        os.write(ours, b"tell me a lot\r")
        at = wait_for("lot\r\n", at)
        while len(shown) < at + 5:
            shown += os.read(ours, 4096).decode(errors="replace")
        os.write(ours, b"\x03")
        at = wait_for("(stopped)", at)
        at = wait_for("\n> ", at)
        os.write(ours, b"/exit\r")
        assert running.wait(60 * crowding()) == 0
    finally:
        running.kill()
        os.close(ours)
