"""Runs side by side: what differs, what is drawn, what smoothing does."""

import base64
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_rl.analysis.axes import striped
from spmd_rl.analysis.curves import (
    Curve,
    Run,
    as_text,
    curves,
    phase_seconds,
    read_intervals,
    read_run,
    smoothed,
    smoothing_window,
)
from spmd_rl.analysis.figures import PHASE_COLOURS, draw_all
from spmd_rl.analysis.glyphs import CHINESE, characters
from spmd_rl.analysis.legends import differences, labels
from spmd_rl.analysis.panels import overview, remarks, topics
from spmd_rl.analysis.run_page import as_page, with_files
from spmd_rl.data.samples import write_samples
from spmd_rl.runlog.launches import keep_launch, this_launch


def step(number: int, **others) -> dict:
    row = {"step": number, "grpo/rewards/mean": number / 10, "actor/entropy": 2.0 / number, "actor/kl_loss": 0.0}
    row |= {"timing/all": 10.0, "timing/rollout": 3.0, "timing/update": 5.0, "timing/rule_reward": 50.0}
    row |= {"reward/cause/correct": 0.25, "reward/cause/wrong": 0.75, "reward/cause/crash": 0.0}
    return row | others


def a_run(name: str, steps: int = 3, **settings) -> Run:
    return Run(name, [step(n) for n in range(1, steps + 1)], {key.replace("__", "."): v for key, v in settings.items()})


def test_labels_say_what_differs_and_names_of_runs_do_not():
    a = a_run("a", algorithm__samples_per_prompt=8, run__name="a", train__steps=3, reward__rules__format=0.5)
    b = a_run("b", algorithm__samples_per_prompt=4, run__name="b", train__steps=3)
    assert differences([a, b]) == {"algorithm.samples_per_prompt": [8, 4], "reward.rules.format": [0.5, "not set"]}
    assert labels([a, b]) == ["a: samples_per_prompt=8, format=0.5", "b: samples_per_prompt=4, format=not set"]
    assert labels([a]) == ["a"] and labels([a, a]) == ["a (1)", "a (2)"]


def test_settings_of_one_name_in_two_sections_keep_their_section():
    a, b = a_run("a", parallel__tensor=1, rollout__tensor=1), a_run("b", parallel__tensor=2, rollout__tensor=2)
    assert labels([a, b])[0] == "a: parallel.tensor=1, rollout.tensor=1"


def test_a_legend_begins_with_algorithm_rate_and_model_by_its_name():
    ours = {"train__steps": 1, "algorithm__gamma": 1.0, "train__learning_rate": 1e-6, "model__path": "/here/qwen"}
    a = a_run("a", **ours, algorithm__advantage="grpo", parallel__tensor=1)
    b = a_run("b", **{**ours, "train__learning_rate": 2e-6, "model__path": "/there/qwen"}, algorithm__advantage="gae")
    assert labels([a, b])[1] == "b: advantage=gae, learning_rate=2e-06, tensor=not set"
    c = a_run("c", **{**ours, "model__path": "/here/llama"}, parallel__tensor=2)
    assert labels([a, c])[1] == "c: advantage=not set, path=llama, tensor=2"


def test_a_phase_has_one_colour_of_its_own():
    assert len(set(PHASE_COLOURS.values())) == len(PHASE_COLOURS) and set(phase_seconds(a_run("a"))) == set(
        PHASE_COLOURS
    )


def test_what_is_zero_in_every_step_is_said_and_not_drawn():
    run = a_run("a")
    assert "KL to the reference model" not in {panel.title for panel in overview([run])}
    [said] = remarks([run])
    assert said == "0 in every step, so not drawn: KL to the reference model"


def test_an_evaluation_has_intervals_of_what_it_asked_and_a_page_says_what_a_run_was(tmp_path):
    (tmp_path / "evaluations").mkdir()
    answers = [{"accuracy": float(n < 9), "samples": [{}]} for n in range(10)]
    lines = "".join(json.dumps(line) + "\n" for line in answers)
    (tmp_path / "evaluations" / "step_000003_gsm8k_test.jsonl").write_text(lines)
    (tmp_path / "evaluations" / "step_000004_gsm8k_test.jsonl").write_text(lines[:-5])  # being written
    found = read_intervals(tmp_path)
    assert found == {"eval/gsm8k_test/accuracy": {3: pytest.approx((0.596, 0.982), abs=1e-3)}}
    keep_launch(tmp_path, replace(this_launch(2, 0), command="torchrun -m spmd_rl.grpo"))
    keep_launch(tmp_path, this_launch(2, 7))
    run = Run("a", [step(3), {"step": 3, "eval/gsm8k_test/accuracy": 0.9}], {"train.steps": 5}, found)
    page = as_page([run], {"reward.pdf": "Reward"}, [], [tmp_path])
    assert "| steps | 3 of 5 |" in page and "[Reward](reward.pdf)" in page and "![" not in page
    assert "0.9 ± 0.19 → 0.9 ± 0.19" in page and "| launches | 2, resumed after step 7 |" in page
    assert all(f"| {fact} |" in page for fact in ("begun", "command", "commit", "versions"))


def test_a_page_shows_the_pictures_of_its_samples_whichever_of_a_prompts_samples_has_them(tmp_path):
    picture = "data:image/jpeg;base64," + base64.b64encode(b"a picture").decode()
    for number in (1, 2, 3):
        lines = [
            {"step": number, "index": 5, "cause": "wrong", "question": "Q", "response": "R", "reward": 0.0},
            {"step": number, "index": 5, "cause": "wrong", "response": "again", "thumbnails": [picture, picture]},
            {"step": number, "index": 6, "cause": "correct", "response": "shows none"},
        ]
        write_samples(tmp_path / "samples" / f"step_{number:06d}.jsonl", lines)
    page, files = with_files(as_page([Run("a", [step(3)], {}, {})], {}, [], [tmp_path]))
    [name] = files
    assert files[name] == b"a picture" and "data:" not in page
    assert page.count(f"![picture]({name})") == 4, "two pictures, in the first and in the last step"
    shown = page.splitlines()
    assert shown[shown.index(f"![picture]({name}) ![picture]({name})") - 2] == "```", "below its sample"


def test_phases_and_the_rest_add_up_to_the_step_without_what_is_hidden_behind_them():
    assert {phase: seconds for phase, seconds in phase_seconds(a_run("a", 1)).items() if any(seconds)} == {
        "rollout": [3.0],
        "update": [5.0],
        "other": [2.0],
    }


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60))
def test_smoothing_keeps_the_number_and_the_range_and_few_values_as_they_are(values):
    line = smoothed(values, smoothing_window(len(values)))
    assert len(line) == len(values) and (len(values) >= 8 or line == values)
    assert min(values) - 1e-6 <= min(line) and max(line) <= max(values) + 1e-6


@given(st.floats(-5, 5), st.floats(-5, 5), st.integers(8, 60))
def test_smoothing_leaves_a_straight_line_alone_except_at_its_ends(slope, start, count):
    values = [start + slope * n for n in range(count)]
    half = smoothing_window(count) // 2
    assert smoothed(values, 2 * half + 1)[half:-half] == pytest.approx(values[half:-half])


@pytest.mark.long
def test_runs_with_different_metrics_are_drawn_together_and_what_is_missing_is_said(tmp_path):
    short, long = a_run("$short$", 2), a_run("_long", 60)
    evaluated = Run("evaluated", [*short.rows, {"step": 2, "eval/math/accuracy": 0.5}, {"step": 3, "grad_norm": None}])
    pictures, notes = draw_all([short, long, evaluated], tmp_path)
    drawn = "overview", "reward", "entropy", "evaluation", "time", "causes"
    assert set(pictures) == {f"{name}.png" for name in drawn}
    for name in pictures:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG") and (tmp_path / name).stat().st_size > 5000
    assert "not measured in $short$, _long: Held-out math accuracy" in notes
    page = as_page([short, long, evaluated], pictures, notes)
    assert "![Reward](reward.png)" in page and "| reward | 0.1 → 0.2 |" in page and "not measured" in page
    assert "All settings are the same." in page


def test_a_run_of_ppo_is_drawn_over_one_of_grpo_with_a_picture_of_its_critic(tmp_path):
    ppo = [
        {
            "step": n,
            "critic/rewards/mean": n / 9,
            "critic/values/mean": n / 10,
            "critic/explained_variance": 0.1,
            "kl/beta": 0.1,
        }
        | {
            "timing/all": 9.0,
            "timing/update_critic": 3.0,
            "timing/critic_model": 1.0,
            "acc_rewards/mean": 1.0,
            "b_rewards/mean": 1.0,
        }
        for n in range(1, 9)
    ]
    grpo = [
        {"step": n, "grpo/rewards/mean": n / 9, "grpo/acc_rewards/mean": 1.0, "acc_rewards/mean": 1.0} for n in (1, 2)
    ]
    runs = [Run("ppo", ppo), Run("grpo", grpo)]
    pictures, _ = draw_all(runs, tmp_path)
    assert {"critic.png", "reward.png", "time.png"} <= set(pictures)
    assert [one.title for one in curves(ppo)] == ["reward", "variance of the returns that the critic explains"]
    seconds = phase_seconds(runs[0])
    assert (seconds["update"][0], seconds["critic"][0], seconds["other"][0]) == (3.0, 1.0, 5.0)
    panels = {panel.title: panel.names for _, _, panels in topics(runs) for panel in panels}
    assert panels["Rule acc"] == ("acc_rewards/mean", "grpo/acc_rewards/mean") and panels["Rule b"] == (
        "b_rewards/mean",
    )


def test_rows_without_anything_to_draw_are_refused(tmp_path):
    with pytest.raises(ValueError, match="empty: no metric that there is a picture of"):
        draw_all([Run("empty", [{"step": 1}])], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_broken_line_and_a_broken_config_are_named(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    for text in ('{"step": 1}\nnonsense\n', '{"step": 1}\n[]\n'):
        metrics.write_text(text)
        with pytest.raises(ValueError, match="metrics.jsonl, line 2"):
            read_run(tmp_path)
    metrics.write_text(json.dumps(step(1)) + "\n")
    assert read_run(tmp_path).settings == {}
    (tmp_path / "config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="config.yaml: cannot be read"):
        read_run(tmp_path)
    (tmp_path / "config.yaml").write_text("train: {steps: 2}\nreward: {rules: {math_answer: 1.0}}\n")
    assert read_run(tmp_path).settings == {"train.steps": 2, "reward.rules.math_answer": 1.0}


@pytest.mark.parametrize(("steps", "named"), [((1, 2), "1 2"), ((3,), "3"), (range(1, 17), "1 4 7 10 13 16")])
def test_a_plot_for_a_terminal_names_whole_steps(steps, named):
    steps = tuple(steps)
    drawn = as_text([Curve("reward", steps, tuple(float(step) for step in steps))], width=70)
    assert named in [" ".join(line.split()) for line in drawn.splitlines()], drawn


def test_a_character_that_no_font_has_is_its_number_and_one_line_says_so(tmp_path, recwarn, monkeypatch):
    monkeypatch.setattr("spmd_rl.analysis.glyphs.CHINESE", ())
    runs = [a_run("数学", reward__rules="a"), a_run("plain – b", reward__rules="b")]
    _, notes = draw_all(runs, tmp_path, "svg")
    [note] = [note for note in notes if "no font" in note]
    assert "数" in note and "学" in note and "–" not in note and "Noto Sans CJK SC" in CHINESE
    assert not [str(one.message) for one in recwarn if "Glyph" in str(one.message)]
    assert "é" in characters(["DejaVu Sans"]) and "数" not in characters(["DejaVu Sans"])


def test_curves_that_lie_on_each_other_take_turns():
    same, near = Curve("", (1, 2), (3.0, 3.0)), Curve("", (1, 2), (3.0, 3.01))
    far, later = Curve("", (1, 2), (3.0, 4.0)), Curve("", (2, 3), (3.0, 3.0))
    dashes = striped({"a": same, "b": far, "c": near, "d": later, "e": same}, 0.05)
    assert dashes["b"] == dashes["d"] == "-"
    # Of a period of 15 each is drawn for 5: an offset is where in it a line begins.
    assert [dashes[name] for name in "ace"] == [(15.0, (5.0, 10.0)), (10.0, (5.0, 10.0)), (5.0, (5.0, 10.0))]
