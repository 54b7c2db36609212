import io
import json
import math
import os
import pty
import re
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.analysis.curves import as_text, curves, read_rows
from spmd_rl.analysis.figures import draw_all
from spmd_rl.config.config import CheckpointConfig, Config, ModelConfig, RunConfig, TrainConfig
from spmd_rl.config.loading import dump
from spmd_rl.config.names import ALIASES
from spmd_rl.config.reward_config import RewardModelConfig
from spmd_rl.data.digests import digests_of
from spmd_rl.distributed.status import RankStatus
from spmd_rl.distributed.terminal_lines import TerminalLines
from spmd_rl.runlog.checkpoint_store import CheckpointStore
from spmd_rl.runlog.console import SHOWN, TIMES, PlainConsole, evaluation_line, step_line
from spmd_rl.runlog.run_dir import lost_work, way_on
from spmd_rl.runlog.run_log import RunLog, combine, tokens_per_second
from spmd_rl.runlog.sinks import grouped, require_wandb_key
from spmd_rl.runlog.start_up import StartUp

CONFIG = Config(
    model=ModelConfig(path="nowhere"),
    train=TrainConfig(steps=40, prompts_per_step=4),
    run=RunConfig(name="small", tensorboard=False),
)
STEP_METRICS = [*(name for _, names, _ in SHOWN for name in names), *(name for _, name in TIMES), "e2e_tps"]
SAMPLE = {
    "prompt": "2 + 2",
    "response": "[b]4[/b]",
    "answer": "4",
    "reward": 1.0,
    "cause": "correct",
    "finish_reason": "stop",
}


def rows_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_step_becomes_one_row_on_disk_as_soon_as_it_ends(tmp_path):
    log = RunLog(CONFIG, tmp_path / "run", world_size=2)
    with log.step(1):
        log.add_all({"grpo/rewards/mean": 0.5, "grad_norm": math.inf})
    [row] = rows_of(tmp_path / "run")
    assert row["step"] == 1 and row["grpo/rewards/mean"] == 0.5 and row["timing/all"] > 0
    assert row["grad_norm"] is None  # JSON has no infinity
    log.close()
    log.close()


def test_a_step_that_is_cut_short_leaves_no_row_and_the_log_says_so(tmp_path, capsys):
    with pytest.raises(RuntimeError, match="out of luck"), RunLog(CONFIG, tmp_path / "run", 1) as log:
        with log.step(1) as timed, timed("rollout"):
            raise RuntimeError("out of luck")
    assert rows_of(tmp_path / "run") == []
    assert "cut short after 0 steps by RuntimeError: out of luck\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("saved", "resume", "way"),
    [
        (0, "auto", "no checkpoint is saved: the same command begins anew"),
        (4, "auto", "the same command resumes from step 4"),
        (4, "never", "the same command, without checkpoint.resume = never, resumes from step 4"),
    ],
)
def test_what_ended_a_run_and_where_and_how_to_go_on_are_the_last_words_of_its_log(tmp_path, saved, resume, way):
    train = replace(CONFIG.train, max_skipped=2)
    config = replace(CONFIG, checkpoint=CheckpointConfig(resume=resume), train=train)
    run_dir, kept = tmp_path / "run", CheckpointStore(tmp_path / "run" / "checkpoints", CheckpointConfig())
    with pytest.raises(RuntimeError), RunLog(config, run_dir, 1) as log:
        if saved:
            partial = kept.begin(saved, 0)
            kept.complete(saved, digests_of(partial, kept.seal(saved, {})))
        for step in (1, 2):
            with log.step(step):
                log.learning({}, "the norm is nan")
    told = (run_dir / "run.log").read_text().splitlines()
    begins = next(
        number for number, line in enumerate(told) if line.startswith("cut short after 1 step by RuntimeError")
    )
    assert ": train.max_skipped = 2: so many updates in a row were skipped" in told[begins]
    assert told[begins + 1 : -1][-1].startswith("  run_log.py:") and told[begins + 1 : -1][-1].endswith(" in learning")
    assert told[-1] == f"what was measured is in {run_dir}; {way}"


def test_a_checkpoint_that_is_written_and_not_complete_is_gone_on_from(tmp_path):
    kept = CheckpointStore(tmp_path / "checkpoints", CheckpointConfig())
    kept.begin(3, 0)
    assert way_on(tmp_path, "runs/a/checkpoints/step_000002").endswith(
        "begins from runs/a/checkpoints/step_000002 again"
    )
    kept.seal(3, {})
    assert way_on(tmp_path, "auto") == "the same command resumes from step 3"


@pytest.mark.parametrize(("models", "said"), [({}, True), ({"good": RewardModelConfig("m")}, False)])
def test_a_step_in_which_no_rule_applies_is_said_unless_a_reward_model_scores(tmp_path, capsys, models, said):
    config = replace(CONFIG, reward=replace(CONFIG.reward, models=models))
    with RunLog(config, tmp_path / "run", 2) as log:
        for step, unjudged in ((1, 1.0), (2, 0.9)):
            with log.step(step):
                log.add("reward/cause/unjudged", unjudged)
    told = capsys.readouterr().out
    assert ("step 1: no rule applies to any of its samples" in told) is said and "step 2: no rule" not in told


def test_the_summary_names_what_failed_and_the_steps(tmp_path, capsys):
    with RunLog(CONFIG, tmp_path / "run", 2) as log:
        for step in range(1, 13):
            with log.step(step):
                crashed = 0.5 if step > 2 else 0.0
                log.add_all({"update/skipped": float(step == 7), "reward/cause/crash": crashed, "grpo/rewards/mean": 1})
                log.add("reward/cause/timeout", 0.0)
            if step == 5:
                log.save_failed(5, "step 5 could not be saved: no space left")
    _, _, told = capsys.readouterr().out.partition("summary")
    failed = [" ".join(line.split()[1:]) for line in told.splitlines() if line.strip().startswith("failed")]
    assert failed == [
        "updates skipped: step 7",
        "samples whose rule crashed, 41.7% of all: steps 3, 4, 5, 6, 7, 8, 9, 10, ...",
        "checkpoints not saved: step 5",
    ]


def test_phases_exclude_what_is_timed_inside_them_and_never_exceed_the_step(tmp_path):
    with RunLog(CONFIG, tmp_path / "run", 1) as log:
        with log.step(1) as timed:
            with timed("rollout"):
                time.sleep(0.05)
                with timed("reshard_to_infer"):
                    time.sleep(0.5)
            with timed("update"):
                time.sleep(0.05)
            with timed("update"):
                time.sleep(0.05)
    [row] = rows_of(tmp_path / "run")
    assert 0.05 <= row["timing/rollout"] < 0.5 <= row["timing/reshard_to_infer"]
    assert row["timing/update"] >= 0.1
    whole = row.pop("timing/all")
    again = [row.pop(name) for name in ALIASES.values() if name in row]
    assert again == [row["timing/reshard_to_infer"]], "under the name of other programs' dashboards too"
    assert sum(value for name, value in row.items() if name.startswith("timing/")) <= whole


def test_a_long_run_takes_hardly_any_memory_and_the_newest_step_s_metrics_stay(tmp_path):
    with RunLog(CONFIG, tmp_path / "run", 1) as log:

        def steps(first: int, last: int) -> None:
            for step in range(first, last):
                with log.step(step):
                    log.add_all({f"metric/{number}": step for number in range(80)} | {"grpo/rewards/mean": 0.5})

        log.evaluation(0, {"eval/a/accuracy": 0.25})
        steps(1, 100)
        tracemalloc.start()
        steps(100, 600)
        grown = tracemalloc.get_traced_memory()[0] / 500
        tracemalloc.stop()
        assert grown < 1000, "bytes a step"
        log.evaluation(599, {"eval/b/accuracy": 0.5})
        assert log.last["metric/79"] == 599 and log.last["eval/b/accuracy"] == 0.5
        assert "eval/a/accuracy" not in log.last, "it is of another step's weights"


def test_numbers_of_each_rank_are_kept_by_step_and_those_of_later_steps_go_when_a_run_goes_on(tmp_path):
    run_dir = tmp_path / "run"
    with RunLog(CONFIG, run_dir, 2) as log:
        for step in (1, 2, 3):
            with log.step(step):
                log.ranks(step, [{"process/open_files": step}, {"process/open_files": 9}])
        log.ranks(4, [{"process/open_files": 4}, {"process/open_files": 9}])  # cut short: there is no row of step 4
    with RunLog(CONFIG, run_dir, 2, resumed=3) as log:
        with log.step(4):
            log.ranks(4, [{"process/open_files": 5}, {"process/open_files": 9}])
    kept = [json.loads(line) for line in (run_dir / "ranks.jsonl").read_text().splitlines()]
    assert kept == [{"step": step, "process/open_files": [held, 9]} for step, held in ((1, 1), (2, 2), (3, 3), (4, 5))]


def test_time_outside_steps_belongs_to_no_step(tmp_path):
    with RunLog(CONFIG, tmp_path / "run", 1) as log:
        with log.timed("evaluation"):
            log.add("stray", 1.0)
        with log.step(1):
            pass
    assert not {"timing/evaluation", "stray"} & set(rows_of(tmp_path / "run")[0])


def test_several_values_of_a_metric_become_one():
    assert combine("actor/entropy", [1.0, 2.0]) == 1.5
    assert combine("timing/rule_reward", [1.0, 2.0]) == 3.0
    assert combine("bytes/exchange/network", [1.0, 2.0]) == 3.0
    assert combine("correction/logprob_gap_max", [1.0, 2.0]) == 2.0
    assert combine("response_length/min", [1.0, 2.0]) == 1.0


lengths = st.floats(1, 1e5)
seconds = st.floats(1e-3, 1e5)


@given(lengths, lengths, st.integers(1, 10**5), st.integers(1, 1000), seconds, seconds, seconds)
def test_throughputs_follow_the_published_formulas(response, prompt, sequences, world_size, whole, update, rollout):
    metrics = {
        "response_length/mean": response,
        "prompt_length/mean": prompt,
        "timing/all": whole,
        "timing/update": update,
        "timing/rollout": rollout,
    }
    rates = tokens_per_second(metrics, sequences, world_size)
    tokens = (response + prompt) * sequences / world_size
    assert rates["e2e_tps"] == pytest.approx(tokens / whole)
    assert rates["update_tps"] == pytest.approx(tokens / update)
    assert rates["vllm_tps"] == pytest.approx(tokens / rollout)
    assert rates["rollout/response_tps"] == pytest.approx(response * sequences / world_size / rollout)


def test_a_throughput_without_its_measurements_is_left_out():
    assert tokens_per_second({"timing/all": 1.0}, 8, 1) == {}
    metrics = {"response_length/mean": 1.0, "prompt_length/mean": 1.0, "timing/all": 1.0}
    assert tokens_per_second(metrics, 8, 1) == {"e2e_tps": 16.0}


def test_the_step_line_reads_as_documented():
    row = {
        "step": 12,
        "grpo/rewards/mean": 0.61,
        "actor/kl_loss": 0.002,
        "actor/entropy": 1.03,
        "response_length/mean": 12.4,
        "reward/cause/correct": 0.61,
        "rollout/truncated_fraction": 0.02,
        "grpo/lr": 1e-5,
        "grad_norm": 0.83,
        "timing/rollout": 4.2,
        "timing/update": 7.5,
        "timing/all": 12.1,
        "e2e_tps": 190.0,
    }
    assert step_line(row, steps=40, world_size=2) == (
        "step 12/40  reward 0.610  acc 61%  trunc  2%  len 12.4  kl 0.0020  entropy 1.03  12.1s  380 tok/s"
    )
    assert step_line(row, steps=40, world_size=2, reference=False) == (
        "step 12/40  reward 0.610  acc 61%  trunc  2%  len 12.4  entropy 1.03  grad 0.83  12.1s  380 tok/s"
    )
    assert "acc" not in step_line(row | {"reward/cause/correct": 0.0, "reward/cause/unjudged": 1.0}, 40, 2)
    assert step_line({"step": 3, "grad_norm": math.nan}, steps=40, world_size=2) == "step  3/40  grad nan"


def test_so_many_updates_in_a_row_that_were_skipped_end_the_run_and_one_that_was_made_begins_the_count_anew(
    tmp_path, capsys
):
    config = replace(CONFIG, train=replace(CONFIG.train, max_skipped=2))
    with pytest.raises(RuntimeError, match="train.max_skipped = 2: .*in step 4: the norm is nan"):
        with RunLog(config, tmp_path / "run", 2) as log:
            for step, why in ((1, "the norm is inf"), (2, ""), (3, "the norm is nan"), (4, "the norm is nan")):
                with log.step(step):
                    log.learning({"update/skipped": float(bool(why))}, why)
    assert [row["update/skipped"] for row in rows_of(tmp_path / "run")] == [1.0, 0.0, 1.0]
    assert "step 1: the update was skipped: the norm is inf" in capsys.readouterr().out


def test_a_critic_whose_updates_are_made_does_not_hide_that_the_policys_are_not(tmp_path, capsys):
    config = replace(CONFIG, train=replace(CONFIG.train, max_skipped=2))
    with pytest.raises(RuntimeError, match="so many updates of the critic in a row were skipped"):
        with RunLog(config, tmp_path / "run", 2) as log, log.step(1):
            log.learning({}, "the norm is nan", "policy")
            for _ in range(2):
                log.learning({}, "the norm is inf", "critic")
                log.learning({}, "", "policy")
    assert "step 1: the update of the critic was skipped: the norm is inf" in capsys.readouterr().out


def test_steps_in_which_the_rules_failed_on_every_sample_are_said_and_so_many_in_a_row_end_the_run(tmp_path, capsys):
    config = replace(CONFIG, reward=replace(CONFIG.reward, max_failed_steps=2))
    with pytest.raises(RuntimeError, match="reward.max_failed_steps = 2: .*step 4: .* 75% crashed, 25% took too long"):
        with RunLog(config, tmp_path / "run", 2) as log:
            for step, crashed, late in ((1, 1.0, 0.0), (2, 0.5, 0.25), (3, 0.0, 1.0), (4, 0.75, 0.25)):
                with log.step(step):
                    log.add_all({"reward/cause/crash": crashed, "reward/cause/timeout": late})
    said = capsys.readouterr().out
    assert "step 1: the rules failed on every sample" in said and "step 2: the rules" not in said


def test_the_evaluation_line_names_the_benchmark_and_the_moment():
    metrics = {"eval/gsm8k/accuracy": 0.5, "eval/gsm8k/response_length_mean": 30.0}
    assert evaluation_line(0, metrics) == "evaluation before training: gsm8k accuracy 0.500"
    assert evaluation_line(8, metrics) == "evaluation after step 8: gsm8k accuracy 0.500"


def test_the_summary_tells_accuracy_before_and_after_and_where_everything_is(tmp_path, capsys):
    with RunLog(CONFIG, tmp_path / "run", 2) as log:
        log.evaluation(0, {"eval/arithmetic/accuracy": 0.25})
        with log.step(1):
            pass
        log.evaluation(1, {"eval/arithmetic/accuracy": 0.75})
    shown = capsys.readouterr().out
    assert "25.0% -> 75.0%" in shown and "+50.0 points" in shown
    assert str(tmp_path / "run" / "metrics.jsonl") in shown and str(tmp_path / "run" / "samples") in shown
    kept = (tmp_path / "run" / "run.log").read_text().splitlines()
    assert [line for line in kept if not line.startswith(("launched ", "commit "))] == shown.splitlines()


def test_samples_are_kept_as_they_are_and_shown_on_demand(tmp_path, capsys):
    with RunLog(CONFIG, tmp_path / "run", 1) as log:
        log.samples(12, [SAMPLE, SAMPLE], show=1)
    kept = (tmp_path / "run" / "samples" / "step_000012.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in kept] == [SAMPLE, SAMPLE]
    assert capsys.readouterr().out.count("response: [b]4[/b]") == 1


def test_an_earlier_run_in_the_same_directory_is_set_aside_whole_and_nothing_else_is_touched(tmp_path):
    run_dir = tmp_path / "run"
    for step in (1, 2, 3):
        with RunLog(CONFIG, run_dir, 1) as log:
            (run_dir / "notes.txt").write_text("mine")
            log.samples(step, [SAMPLE])
            with log.step(step):
                pass
    assert [row["step"] for row in rows_of(run_dir)] == [3]
    assert [row["step"] for row in rows_of(run_dir / "earlier" / "1")] == [1]
    assert [path.name for path in (run_dir / "earlier" / "2" / "samples").iterdir()] == ["step_000002.jsonl"]
    assert (run_dir / "notes.txt").exists()


def test_tensorboard_reads_back_what_was_logged(tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    config = replace(CONFIG, run=replace(CONFIG.run, tensorboard=True))
    with RunLog(config, tmp_path / "run", 1) as log:
        with log.step(7):
            log.add("actor/entropy", 1.25)
        log.samples(40, [SAMPLE])
    [file] = (tmp_path / "run" / "tensorboard").iterdir()
    found = {
        (event.step, value.tag): value.tensor
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    assert found[7, "actor/entropy"].float_val[0] == 1.25
    assert b"name: small" in found[0, "config"].string_val[0]
    assert b"| 2 + 2 | [b]4[/b] | 4 | 1.0 | correct |" in found[40, "samples"].string_val[0]
    assert any(tag.startswith("_hparams_") for _, tag in found)


@pytest.mark.parametrize(
    ("name", "tag"),
    [("e2e_tps", "speed/e2e_tps"), ("grad_norm", "run/grad_norm"), ("acc_rewards/mean", "rules/acc_rewards/mean")]
    + [("grpo/rewards/mean", "grpo/rewards/mean"), ("grpo/acc_rewards/mean", "grpo/acc_rewards/mean")],
)
def test_tensorboard_has_every_name_in_a_group(name, tag):
    assert grouped(name) == tag


def test_wandb_offline_needs_no_network_no_key_and_no_home_and_says_how_to_upload(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", "/dev/null/nobody")
    monkeypatch.setitem(sys.modules, "openai", ModuleType("openai"))  # as vLLM imports it; W&B advertises for it
    for name in ("WANDB_DATA_DIR", "WANDB_DISABLE_WEAVE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # and again at the end, if the run has set it
    run = replace(CONFIG.run, wandb="offline", wandb_group="seeds", wandb_tags=("a", "b"), wandb_entity="us")
    with RunLog(replace(CONFIG, run=run), tmp_path / "run", 1) as log:
        log.evaluation(0, {"eval/arithmetic/accuracy": 0.25})
        with log.step(1):
            log.add("actor/entropy", 1.25)
        log.samples(1, [SAMPLE])
    said = f"to upload it: wandb sync {tmp_path / 'run'}/wandb/offline-run-*"
    told = capsys.readouterr()
    assert said in told.out and "weave" not in (told.out + told.err).lower()
    rows, run = wandb_rows(tmp_path / "run")
    assert (run.run_group, list(run.tags), run.entity) == ("seeds", ["a", "b"], "us")
    assert [row["step"] for row in rows] == [0, 1, 1] and "samples" in {name.partition("/")[0] for name in rows[2]}


def test_wandb_shows_the_pictures_of_samples(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    picture = "data:image/jpeg;base64,AAAA"
    shown = [SAMPLE | {"step": 1, "index": 4}, SAMPLE | {"step": 1, "index": 4, "thumbnails": [picture] * 2}, SAMPLE]
    with RunLog(replace(CONFIG, run=replace(CONFIG.run, wandb="offline")), tmp_path / "run", 1) as log:
        with log.step(1):
            log.add("actor/entropy", 1.25)
        log.samples(1, shown)
    # What a table shows beside numbers and text W&B keeps apart, to be uploaded with it.
    kept = [file.read_text() for file in (tmp_path / "data" / "artifacts" / "staging").iterdir()]
    table = next(json.loads(text) for text in kept if '"columns"' in text)
    cells = [row[table["columns"].index("pictures")] for row in table["data"]]
    assert [cell["_type"] for cell in cells] == ["html-file"] * 3
    assert cells[0] == cells[1] != cells[2], "a prompt's pictures stand in one of its samples"
    assert any(text.count(picture) == 2 for text in kept)


def leveldb_records(data, block=32768):
    """Yield the records of a log of LevelDB, after W&B's 7 bytes: in each block checksum 4, length 2, kind 1, part."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def wandb_rows(run_dir):
    """Return the rows of all offline runs in the order of their launches, and what the first one is called."""
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted((run_dir / "wandb").glob("offline-run-*/*.wandb"), key=os.path.getmtime)
    records: list = []
    for _ in range(300):  # its writer is another process, which ends after the run has
        records = [Record.FromString(data) for path in files for data in leveldb_records(path.read_bytes())]
        if sum(record.WhichOneof("record_type") == "exit" for record in records) == len(files):
            break
        time.sleep(0.1)
    rows = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    return rows, next(record.run for record in records if record.WhichOneof("record_type") == "run")


def test_rows_at_wandb_go_on_after_a_resume_and_none_is_there_twice(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    config = replace(CONFIG, run=replace(CONFIG.run, wandb="offline"))

    def steps(log, *numbers):
        for number in numbers:
            with log.step(number):
                log.add("actor/entropy", 1.25)

    with RunLog(config, tmp_path / "run", 1) as log:
        steps(log, 1, 2, 3)
        identity = log.identity
    time.sleep(1.1)  # W&B names an offline run's directory by the second
    with RunLog(config, tmp_path / "run", 1, 1, identity) as log:
        steps(log, 2)
        log.evaluation(2, {"eval/arithmetic/accuracy": 0.5})
        steps(log, 3, 4)
        assert log.identity == identity
    rows, _ = wandb_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 2, 4]
    assert rows[3]["eval/arithmetic/accuracy"] == 0.5
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2, 2, 3, 4]


def test_swanlab_is_given_the_same_rows(tmp_path, monkeypatch, capsys):
    calls = []
    fake = SimpleNamespace(
        init=lambda **words: calls.append(words) or SimpleNamespace(id="x1"),
        log=lambda data, step: calls.append((step, data)),
        finish=lambda: calls.append("finished"),
        Text=str,
    )
    monkeypatch.setitem(sys.modules, "swanlab", fake)
    config = replace(CONFIG, run=replace(CONFIG.run, swanlab="offline", wandb_tags=("a",)))
    with RunLog(config, tmp_path / "run", 1) as log:
        log.evaluation(0, {"eval/arithmetic/accuracy": 0.25})
        log.samples(1, [SAMPLE])
        assert log.identity == {"swanlab": "x1"}
    assert calls[0]["mode"] == "offline" and calls[0]["tags"] == ["a"] and calls[0]["project"] == "spmd_rl"
    assert calls[1] == (0, {"eval/arithmetic/accuracy": 0.25}) and "response: [b]4[/b]" in calls[2][1]["samples"][0]
    assert calls[-1] == "finished" and "to upload it: swanlab sync" in capsys.readouterr().out


def test_wandb_online_without_a_key_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    config = replace(CONFIG, run=replace(CONFIG.run, wandb="online"))
    with pytest.raises(ValueError, match="run.wandb = online: .*WANDB_API_KEY.*offline"):
        RunLog(config, tmp_path / "run", 1)
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    require_wandb_key()


def test_importing_and_using_the_run_log_brings_no_torch(tmp_path):
    program = (
        "import sys, pathlib\n"
        "from spmd_rl.config.config import Config, ModelConfig\n"
        "from spmd_rl.runlog.run_log import RunLog\n"
        "import spmd_rl.analysis.curves, spmd_rl.analysis.figures, spmd_rl.analysis.self_correction\n"
        "with RunLog(Config(model=ModelConfig(path='m')), pathlib.Path(sys.argv[1]), 1) as log:\n"
        "    with log.step(1): pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "run")], check=True, cwd=Path(__file__).parents[2])


def test_on_a_terminal_the_phase_is_shown_while_it_lasts_and_lines_stay_whole(tmp_path):
    program = (
        "import sys, time, pathlib\n"
        "from spmd_rl.config.config import Config, ModelConfig, TrainConfig, RunConfig\n"
        "from spmd_rl.runlog.run_log import RunLog\n"
        "config = Config(model=ModelConfig(path='m'), train=TrainConfig(steps=2), run=RunConfig(tensorboard=False))\n"
        "with RunLog(config, pathlib.Path(sys.argv[1]), 1) as log:\n"
        "    with log.step(1) as timed:\n"
        "        with timed('update'): time.sleep(1.2)\n"
        "        log.add('grpo/rewards/mean', 0.5)\n"
    )
    shown = on_a_terminal([sys.executable, "-c", program, str(tmp_path / "run")])
    assert re.search(r"0/2.*update 1 s", shown)
    assert re.search(r"step 1/2  reward 0\.500  update \d+\.\ds  \d+\.\ds\r\n", shown)
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor comes back


def on_a_terminal(command: list[str]) -> str:
    """Return what a command writes to a terminal of 120 columns."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": "120", "TERM": "xterm"}
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment, cwd=Path(__file__).parents[2])
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        written += part
        if not part:
            break
    os.close(ours)
    assert process.wait(timeout=60) == 0, written.decode()
    return written.decode()


def test_curves_come_from_the_metrics_file_and_skip_what_was_not_measured(tmp_path):
    lines = [
        '{"step": 0, "eval/math/accuracy": 0.25}',
        '{"step": 1, "grpo/rewards/mean": 0.5, "actor/entropy": null}',
        '{"step": 2, "grpo/rewards/mean": 0.75, "actor/entropy": 0.5}',
        '{"step": 2, "eval/math/accuracy": 0.5}',
        '{"step": 3, "grpo/rew',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    found = {curve.title: (curve.steps, curve.values) for curve in curves(read_rows(tmp_path))}
    assert found == {
        "reward": ((1, 2), (0.5, 0.75)),
        "entropy": ((2,), (0.5,)),
        "held-out math accuracy": ((0, 2), (0.25, 0.5)),
    }
    text = as_text(curves(read_rows(tmp_path)), width=60)
    assert "reward: 0.5 -> 0.75" in text and "\x1b" not in text and max(map(len, text.splitlines())) <= 60


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="metrics.jsonl does not exist"):
        read_rows(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="no rows yet"):
        read_rows(tmp_path)


def test_a_png_without_matplotlib_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        draw_all([], tmp_path)


def test_a_run_that_goes_on_keeps_what_is_before_and_sets_aside_what_came_later(tmp_path, capsys):
    run = tmp_path / "run"
    with RunLog(CONFIG, run, 1) as log:
        log.evaluation(0, {"eval/sums/accuracy": 0.25})
        for step in (1, 2, 3):
            with log.step(step):
                log.add("grpo/rewards/mean", step / 10)
            log.samples(step, [SAMPLE])
        log.evaluation(2, {"eval/sums/accuracy": 0.5})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "grpo/rew')  # the run was killed while it wrote
    with RunLog(CONFIG, run, 1, resumed=2) as log:
        assert log.last["eval/sums/accuracy"] == 0.5 and log.last["grpo/rewards/mean"] == 0.2
        with log.step(3):
            log.add("grpo/rewards/mean", 0.9)
    assert [(row["step"], row.get("grpo/rewards/mean")) for row in rows_of(run)] == [
        (0, None),
        (1, 0.1),
        (2, 0.2),
        (2, None),
        (3, 0.9),
    ]
    assert sorted(path.name for path in (run / "samples").iterdir()) == ["step_000001.jsonl", "step_000002.jsonl"]
    earlier = run / "earlier" / "1"
    assert (
        '"step": 3' in (earlier / "metrics.jsonl").read_text() and (earlier / "samples" / "step_000003.jsonl").exists()
    )
    said = (run / "run.log").read_text()
    assert "resuming from step 2" in said and "what it had done after step 2 is in" in said
    assert said.count("run small:") == 2


def test_a_run_that_goes_on_from_an_older_checkpoint_moves_the_later_ones_and_points_to_it(tmp_path):
    run = tmp_path / "run"
    with RunLog(CONFIG, run, 1) as log:
        for step in (1, 2, 3):
            with log.step(step):
                pass
            (run / "checkpoints" / f"step_00000{step}").mkdir(parents=True)
            (run / "checkpoints" / f"step_00000{step}" / "state.json").write_text(str(step))
    (run / "checkpoints" / "latest").write_text("step_000003\n")
    with RunLog(CONFIG, run, 1, resumed=1):
        pass
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step_000001"]
    assert (run / "checkpoints" / "latest").read_text() == "step_000001\n"
    moved = run / "earlier" / "1" / "checkpoints"
    assert {path.name: (path / "state.json").read_text() for path in moved.iterdir()} == {
        "step_000002": "2",
        "step_000003": "3",
    }


def test_a_run_goes_on_where_only_its_checkpoints_were_copied(tmp_path):
    with RunLog(CONFIG, tmp_path / "run", 1, resumed=2) as log, log.step(3):
        pass
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [3]


def test_what_another_run_had_done_is_not_lost_by_a_restart(tmp_path):
    with RunLog(CONFIG, tmp_path / "run", 1) as log, log.step(1):
        pass
    with RunLog(CONFIG, tmp_path / "run", 1, restarts=1, lost_after=None) as log, log.step(1):
        pass
    [row] = rows_of(tmp_path / "run")
    assert (row["restart/count"], row["restart/lost_steps"]) == (1, 0)


def test_after_a_continuation_the_next_row_and_the_log_say_what_was_lost(tmp_path, capsys):
    with RunLog(CONFIG, tmp_path / "run", 1) as log:
        for step in (1, 2, 3, 4):
            with log.step(step):
                time.sleep(0.01)
    times = [row["time"] for row in rows_of(tmp_path / "run")]
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "ti')  # it was killed while it wrote
    with RunLog(CONFIG, tmp_path / "run", 1, resumed=2, restarts=3) as log:
        for step in (3, 4):
            with log.step(step):
                pass
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert (rows[2]["restart/count"], rows[2]["restart/lost_steps"]) == (3, 2)
    assert rows[2]["restart/lost_seconds"] == pytest.approx(times[3] - times[1])
    assert "restart/count" not in rows[1] | rows[3]
    assert "torchrun has started the ranks again 3 times; lost: 2 steps" in capsys.readouterr().out


@pytest.mark.parametrize("exported", [True, False])
def test_a_finished_run_that_goes_on_has_lost_nothing_and_one_that_was_cut_short_says_what(tmp_path, capsys, exported):
    config = replace(CONFIG, train=replace(CONFIG.train, steps=1))
    with RunLog(config, tmp_path / "run", 1) as log, log.step(1):
        pass
    (tmp_path / "run" / "config.yaml").write_text(dump(config))
    if exported:
        (tmp_path / "run" / "hf").mkdir()
    with RunLog(config, tmp_path / "run", 1, resumed=1):
        pass
    assert ("lost: 0 steps" in capsys.readouterr().out) == (not exported)


def test_where_the_clock_was_set_back_no_seconds_are_lost(tmp_path):
    rows = [{"step": 1, "time": 1000.0}, {"step": 2, "time": 400.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert lost_work(tmp_path, 1) == (1, 0.0)


def test_a_restart_without_any_checkpoint_loses_all_steps(tmp_path):
    with RunLog(CONFIG, tmp_path / "run", 1) as log, log.step(1):
        pass
    with RunLog(CONFIG, tmp_path / "run", 1, restarts=1) as log, log.step(1):
        pass
    [row] = rows_of(tmp_path / "run")
    assert (row["restart/count"], row["restart/lost_steps"]) == (1, 1)
    with RunLog(CONFIG, tmp_path / "run", 1) as log, log.step(1):
        pass
    assert "restart/count" not in rows_of(tmp_path / "run")[0]  # another run in the same place


def test_a_kill_while_an_earlier_run_is_moved_leaves_the_rest_to_the_next_start(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    with RunLog(CONFIG, run_dir, 1) as log, log.step(1):
        pass
    (run_dir / "samples" / "step_000001.jsonl").write_text("{}\n")
    rename, moved = Path.rename, []

    def interrupted(path, target):
        if len(moved) == 2:
            raise KeyboardInterrupt
        moved.append(path.name)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        RunLog(CONFIG, run_dir, 1)
    monkeypatch.undo()
    RunLog(CONFIG, run_dir, 1).close()
    assert rows_of(run_dir) == []
    assert not list((run_dir / "samples").iterdir())
    assert len(list((run_dir / "earlier").rglob("step_000001.jsonl"))) == 1


@given(st.dictionaries(st.sampled_from([*STEP_METRICS]), st.floats(-1e9, 1e9)), st.integers(1, 10**6))
def test_a_steps_line_fits_100_columns_and_keeps_what_matters(row, steps):
    line = step_line({"step": steps, "reward/cause/wrong": 1.0} | row, steps, 1024)
    assert len(line) <= 100 and line.startswith(f"step {steps}/{steps}")
    usual = {name: 0.5 for name in STEP_METRICS} | {"response_length/mean": 4096.0, "e2e_tps": 1000.0}
    shown = step_line({"step": 9999} | usual, 9999, 64)
    assert all(f"  {label} " in shown for label in ("reward", "acc", "trunc")) and "  0.5s" in shown


def test_a_critics_line_has_the_speed_and_the_value_loss():
    row = {name: 0.5 for name in STEP_METRICS} | {"response_length/mean": 14.2, "e2e_tps": 130.0, "timing/all": 21.8}
    assert step_line({"step": 8, **row}, 16, 2, reference=False) == (
        "step  8/16  reward 0.500  acc 50%  trunc 50%  vf loss 0.500  explained 0.50  21.8s  260 tok/s"
    )


def test_a_part_of_a_start_that_goes_on_after_another_has_one_line(capsys):
    shown = PlainConsole()
    for part in ("imports", "meeting the ranks", "imports"):
        shown.starting(part)
    assert capsys.readouterr().out.splitlines() == ["starting: imports", "starting: meeting the ranks"]


def test_a_start_is_told_part_by_part_and_at_its_end_where_the_time_went():
    class Told(list):
        def line(self, text):
            self.append(text)

        def starting(self, part):
            self.append(part)

    told, ticks = Told(), iter([0.0, 0.0, 2.0, 3.0, 8.0, 8.5])
    start = StartUp(told, clock=lambda: next(ticks))
    for status in (
        RankStatus(doing="reads the prompts"),
        RankStatus(doing=""),
        RankStatus(doing="reads the prompts"),
        RankStatus(doing="starts vLLM"),
        RankStatus(phase="rollout", verb="to_rollout"),
        RankStatus(phase="rollout", verb="", doing="starts vLLM"),
        RankStatus(phase="rollout", verb="generate"),
    ):
        start.hear(status)
    ended = "started in 8.5 s: imports 2.0, prompts 1.0, engine 5.0, first refresh 0.5"
    assert told == ["imports", "prompts", "engine", "first refresh", ended]


def test_lines_of_another_process_take_the_place_of_the_bar(tmp_path):
    held = io.StringIO()
    lines = TerminalLines(held)
    print("a", "b", file=lines)
    lines.write("half")
    assert held.getvalue() == "\r\x1b[2Ka b\n"
    lines.flush()
    assert held.getvalue().endswith("\r\x1b[2Khalf") and not lines.isatty()


def test_patches_and_versions_are_in_the_log_and_not_on_the_console(tmp_path, capsys):
    with RunLog(CONFIG, tmp_path / "run", 1) as log:
        log.keep("patch of something")
    kept, said = (tmp_path / "run" / "run.log").read_text(), capsys.readouterr().out
    assert "patch of something" in kept and "commit " in kept and "launched " in kept
    assert "patch of" not in said and "launched" not in said


def test_a_log_service_that_fails_does_not_end_the_run_and_is_said_once(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise OSError("no space left")

    config = replace(CONFIG, run=replace(CONFIG.run, tensorboard=True))
    with RunLog(config, tmp_path / "run", 1) as log:
        monkeypatch.setattr("spmd_rl.runlog.sinks.TensorBoard.write", broken)
        for step in (1, 2):
            with log.step(step):
                pass
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2]
    assert capsys.readouterr().out.count("TensorBoard failed, and is given nothing more: OSError: no space left") == 1


def test_a_run_that_wandb_does_not_begin_is_refused_with_a_way_out(tmp_path, monkeypatch):
    import wandb

    def refuse(**_):
        raise wandb.errors.CommError("entity nobody not found")

    monkeypatch.setattr(wandb, "init", refuse)
    config = replace(CONFIG, run=replace(CONFIG.run, wandb="offline"))
    with pytest.raises(ValueError, match="run.wandb = offline: .*entity nobody not found; .*run.wandb_entity"):
        RunLog(config, tmp_path / "run", 1)
