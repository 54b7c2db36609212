import pytest

from spmd_rl.config.resume_policy import changes, resume_problems


def refused(before, now, allowed):
    return [str(problem) for problem in resume_problems(before, now, allowed)]


BEFORE = {"train.learning_rate": 1e-6, "train.steps": 10, "train.schedule": "constant", "run.seed": 1, "run.name": "a"}


@pytest.mark.parametrize(
    "name, value",
    [
        ("run.name", "b"),
        ("parallel.tensor", 2),
        ("rollout.tensor", 4),
        ("rollout.canary_steps", 3),
        ("checkpoint.every_steps", 5),
        ("evaluation.every_steps", 5),
        ("train.steps", 20),
    ],
)
def test_what_does_not_change_what_is_computed_may_differ(name, value):
    assert refused(BEFORE, {**BEFORE, name: value}, ()) == []


@pytest.mark.parametrize(
    "name, value",
    [("train.learning_rate", 1e-5), ("run.seed", 2), ("algorithm.clip_low", 0.1), ("rollout.temperature", 0.7)],
)
def test_what_does_is_refused_with_both_values_and_the_way_out_unless_it_is_allowed(name, value):
    [problem] = refused(BEFORE, {**BEFORE, name: value}, ())
    assert problem.startswith(f"{name} = {value}: the run to go on with had {BEFORE.get(name)}; ")
    assert "checkpoint.resume_allow" in problem and "checkpoint.resume = never" in problem
    assert refused(BEFORE, {**BEFORE, name: value}, (name,)) == []
    assert refused(BEFORE, {**BEFORE, name: value}, (name.split(".")[0] + ".",)) == (
        [problem] if "seed" in name else []
    )


@pytest.mark.parametrize("allowed", ["reward.rules", "reward.rules.", "reward.rules.math_answer", "reward"])
def test_a_setting_with_parts_is_allowed_by_its_own_name_or_a_part_s(allowed):
    before, now = {"reward.rules.math_answer": 1.0}, {"reward.rules.math_answer": 0.5}
    [problem] = refused(before, now, ())
    assert problem.startswith("reward.rules.math_answer = 0.5: the run to go on with had 1.0; ")
    assert refused(before, now, (allowed,)) == []
    assert refused(before, now, ("reward.rule",)) == [problem]


def test_a_schedule_that_ends_at_the_last_step_keeps_its_length():
    before = {**BEFORE, "train.schedule": "cosine"}
    assert len(refused(before, {**before, "train.steps": 20}, ())) == 1


def test_all_differences_are_listed():
    assert changes(BEFORE, {**BEFORE, "run.name": "b", "new.knob": 1}) == [
        ("run.name", "a", "b"),
        ("new.knob", None, 1),
    ]
    assert len(refused(BEFORE, {**BEFORE, "train.learning_rate": 1, "run.seed": 3}, ())) == 2
