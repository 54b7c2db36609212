from fractions import Fraction

import numpy as np
import pytest

from spmd_rl.rewards.grade import Grade, as_grade


@pytest.mark.parametrize(
    "value",
    [1, 1.0, True, Fraction(1), np.float32(1), np.int64(1), np.bool_(True), np.array(1.0), Grade(np.float64(1))],
)
def test_every_kind_of_number_is_a_score(value):
    score = as_grade("mine", value).score
    assert score == 1.0 and type(score) is float


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        "1.0",
        None,
        np.float32("nan"),
        [1.0],
        1j,
        10**400,
        Grade(None),
        Grade(-np.inf),
    ],
)
def test_what_is_no_finite_number_is_refused_by_the_rules_name_and_the_value(value):
    with pytest.raises(ValueError, match="'mine' returned ") as error:
        as_grade("mine", value)
    assert repr(value)[:100] in str(error.value)


def test_a_cause_that_nobody_counts_is_refused():
    with pytest.raises(ValueError, match="cause 'lazy'; choose one of correct, wrong"):
        as_grade("mine", Grade(0.0, "lazy"))
