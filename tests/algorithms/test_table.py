import subprocess
import sys

import pytest

from spmd_rl.algorithms.table import (
    ADVANTAGES,
    CORRECTIONS,
    LOSSES,
    REDUCTIONS,
    compares_with_greedy,
    find_advantage,
    find_curation,
    find_loss,
    find_reduction,
    try_algorithms,
    unknown_algorithms,
)
from spmd_rl.config.config import AlgorithmConfig

GROUPS, REWARDS = [0, 0, 1, 1], [0.0, 1.0, 0.5, 0.5]


@pytest.fixture
def own(tmp_path):
    """Return how a function of a file of the user's is spelled; its source is given."""

    def write(source: str) -> str:
        file = tmp_path / "own.py"
        file.write_text(source)
        return f"{file}:f"

    return write


def test_what_is_built_in_goes_by_its_name():
    assert find_advantage(AlgorithmConfig(normalize_std=False))(GROUPS, REWARDS) == [-0.5, 0.5, 0.0, 0.0]
    assert find_curation(AlgorithmConfig())(GROUPS, REWARDS) == [True] * 4
    assert find_reduction(AlgorithmConfig(loss_reduction="sequence_mean"), 8)([1, 3]) == [0.5, 1 / 6]
    assert find_reduction(AlgorithmConfig(loss_reduction="fixed_length"), 8)([1, 3]) == [1 / 16, 1 / 16]
    try_algorithms(AlgorithmConfig())


@pytest.mark.parametrize(
    "table, knob",
    [(ADVANTAGES, "advantage"), (LOSSES, "loss"), (REDUCTIONS, "loss_reduction"), (CORRECTIONS, "correction")],
)
def test_everything_that_is_built_in_can_be_used(table, knob):
    for name in table.functions:
        try_algorithms(AlgorithmConfig(**{knob: name}))


def test_an_advantage_that_asks_for_them_is_given_lengths_and_greedy_rewards(own):
    name = own("def f(groups, rewards, baselines, tokens): return [b * t for b, t in zip(baselines, tokens)]\n")
    algorithm = AlgorithmConfig(advantage=name)
    assert find_advantage(algorithm)(GROUPS, REWARDS, tokens=[1, 2, 3, 4], baselines=REWARDS) == [0, 2, 1.5, 2]
    asking = [n for n in (*ADVANTAGES.functions, name) if compares_with_greedy(AlgorithmConfig(advantage=n))]
    assert asking == ["remax", name]


def test_a_divergence_in_the_reward_is_not_in_the_loss_too():
    for in_reward, coefficient in ((False, 0.1), (True, 0.0)):
        loss = find_loss(AlgorithmConfig(kl_coefficient=0.1, kl_in_reward=in_reward))
        assert loss.keywords["kl_coefficient"] == coefficient


def test_dropping_uniform_groups_is_a_curation():
    for algorithm in (AlgorithmConfig(drop_uniform_groups=True), AlgorithmConfig(curation="teaching")):
        assert find_curation(algorithm)(GROUPS, REWARDS) == [True, True, False, False]
    (problem,) = unknown_algorithms(AlgorithmConfig(drop_uniform_groups=True, curation="mine.py:f"))
    assert str(problem).startswith("algorithm.curation = mine.py:f: algorithm.drop_uniform_groups = true")


def test_a_function_of_the_users_takes_options_and_the_settings_that_it_names(own):
    name = own("def f(groups, rewards, std_epsilon, scale=1.0): return [scale * r + std_epsilon for r in rewards]\n")
    estimate = find_advantage(AlgorithmConfig(advantage=f"{name}(scale=2)", std_epsilon=0.25))
    assert estimate(GROUPS, REWARDS) == [0.25, 2.25, 1.25, 1.25]


@pytest.mark.parametrize("knob", ["advantage", "curation", "loss_reduction", "loss", "correction"])
@pytest.mark.parametrize(
    ("name", "reason"),
    [("grpoo", "your own is path/to/file.py:function"), ("nowhere.py:f", "there is no such file")],
)
def test_a_name_that_nothing_has_is_refused_with_its_setting(knob, name, reason):
    with pytest.raises(ValueError, match=f"algorithm.{knob}: '{name}' is not an? .* that can be used; ") as error:
        try_algorithms(AlgorithmConfig(**{knob: name}))
    assert reason in str(error.value)


def test_all_names_that_nothing_has_are_told_at_once_before_anything_is_imported():
    wrong = {"advantage": "x", "curation": "y(a=1)", "loss_reduction": ":f", "loss": "nowhere.py:f"}
    wrong["correction"] = "tis"
    said = [str(problem) for problem in unknown_algorithms(AlgorithmConfig(**wrong))]
    knobs = [text.partition(":")[0] for text in said]
    assert knobs == ["algorithm.advantage", "algorithm.curation", "algorithm.loss_reduction", "algorithm.correction"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def f(groups, rewards): return rewards[1:]", "it returned 3 numbers; one for each sample is needed"),
        ("def f(groups, rewards): return [float('nan')] * 4", r"4 of its numbers are not finite \(of sample 0: nan\)"),
        ("def f(groups, rewards): return None", "gave it 4 samples: TypeError: 'NoneType' object is not iterable"),
        ("def f(groups, rewards): return 1 / 0", "gave it 4 samples: ZeroDivisionError"),
        ("def f(groups): return groups", "gave it 4 samples: TypeError"),
    ],
)
def test_an_answer_that_is_no_advantage_is_found_out_before_a_run(own, source, reason):
    with pytest.raises(ValueError, match=f"algorithm.advantage: .*own.py:f' is not an advantage .*{reason}"):
        try_algorithms(AlgorithmConfig(advantage=own(source)))


def test_an_answer_that_is_no_advantage_is_found_out_in_a_run(own):
    source = "def f(groups, rewards): return [float('inf') if r == 7 else r for r in rewards]"
    estimate = find_advantage(AlgorithmConfig(advantage=own(source)))
    assert estimate([0, 0], [0.5, 1.0]) == [0.5, 1.0]
    with pytest.raises(ValueError, match=r"gave it 2 samples: 1 of its numbers are not finite \(of sample 1: inf\)"):
        estimate([0, 0], [0.5, 7.0])


def test_all_functions_that_cannot_be_used_are_told_at_once():
    wrong = {"advantage": "nowhere.py:f", "curation": "no.module:f", "loss": "gspo(what=1)"}
    with pytest.raises(ValueError) as error:
        try_algorithms(AlgorithmConfig(correction="token_mask(low=2.0)", **wrong))
    knobs = [line.partition(":")[0] for line in str(error.value).splitlines()]
    assert knobs == [f"algorithm.{knob}" for knob in ("advantage", "curation", "loss", "correction")]


@pytest.mark.parametrize("name", ["huber", "nowhere.py:f", "no.module:f", "clipped(what=1)"])
def test_a_value_loss_that_cannot_be_used_is_refused_with_its_setting(name):
    with pytest.raises(ValueError, match="algorithm.value_loss: "):
        try_algorithms(AlgorithmConfig(advantage="gae", value_loss=name))


FINE = {
    "loss": "def f(a, b, c, d, e): return a * c, dict.fromkeys(['pg_loss', 'kl_loss', 'clipped', 'ppo_kl'], b)",
    "value_loss": "def f(a, b, c): return (a - c) ** 2, a > b",
    "correction": "def f(a, b, lengths): return (a - b).exp(), a > b",
}


@pytest.mark.parametrize("knob", FINE)
def test_a_function_of_tensors_is_tried_before_a_run(own, knob):
    try_algorithms(AlgorithmConfig(advantage="gae", **{knob: own(FINE[knob])}))


@pytest.mark.parametrize(
    ("knob", "was", "is_now", "reason"),
    [
        ("loss", "return a * c,", "return (a * c)[1:],", r"the loss: it returned a tensor \[4\]; one number for each"),
        ("loss", "return a * c,", "return (a * c).mean(),", r"the loss: it returned a tensor \[\]"),
        ("loss", "return a * c,", "return a.log(),", "the loss: 5 of its numbers are not finite"),
        ("loss", "return a * c,", "return b * c,", "the loss has no gradient"),
        ("loss", "return a * c,", "return (a - a).sqrt(),", "the gradient: 5 of its numbers are not finite"),
        ("loss", "return a * c,", "return a * c * d,", "TypeError: "),  # there is no reference
        ("loss", "'ppo_kl'", "'kl'", "the parts of its loss lack ppo_kl"),
        ("loss", "return a * c,", "return a * c, b,", "it returned tuple; two values are needed"),
        ("value_loss", ", a > b", ", [True] * 5", "where it was clipped: it returned list; a tensor is needed"),
        ("value_loss", "(a - c) ** 2", "(a.detach() - c) ** 2", "the loss has no gradient"),
        ("correction", "(a - b).exp()", "(a - a).log()", "the weights: 5 of its numbers are not finite"),
        ("correction", "(a - b).exp()", "a[0]", r"the weights: it returned a tensor \[\]"),
        ("correction", "lengths", "lengths, more", "TypeError: f.. missing 1 required positional argument"),
    ],
)
def test_a_function_of_tensors_that_cannot_be_used_is_refused_before_a_run(own, knob, was, is_now, reason):
    assert was in FINE[knob]
    with pytest.raises(ValueError, match=f"algorithm.{knob}: .* gave it 5 tokens of 2 samples: {reason}"):
        try_algorithms(AlgorithmConfig(advantage="gae", **{knob: own(FINE[knob].replace(was, is_now))}))


def test_a_loss_of_the_users_is_given_the_settings_that_it_names(own):
    loss = find_loss(
        AlgorithmConfig(loss=own("def f(a, b, c, d, e, *, clip_low): return clip_low, {}\n"), clip_low=0.1)
    )
    assert loss(0, 0, 0, 0, 0) == (0.1, {})


def test_only_a_loss_brings_torch_in():
    code = "import sys, spmd_rl.algorithms.table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
