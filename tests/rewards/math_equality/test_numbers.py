from fractions import Fraction

import pytest

from spmd_rl.rewards.math_equality.numbers import read_number


@pytest.mark.parametrize(
    "text, value",
    [
        ("1 000", 1000),
        ("1,234,567.5", Fraction("1234567.5")),
        ("1000,99", Fraction("1000.99")),
        ("0,111", Fraction("0.111")),
        ("1.234,56", Fraction("1234.56")),
        ("4 4/9", Fraction(40, 9)),
        ("-4 4/9", Fraction(-40, 9)),
        ("1 000 4/9", Fraction(9004, 9)),
        (r"918\frac{1}{2}", Fraction("918.5")),
        (r"-\frac{10}{9}", Fraction(-10, 9)),
        ("1.5e3", 1500),
        (r"1.5 \times 10^{-3}", Fraction("0.0015")),
        ("5 million", 5_000_000),
        ("\u22127", -7),
    ],
)
def test_a_number_is_read_exactly_in_every_spelling(text, value):
    assert read_number(text).value == value


@pytest.mark.parametrize("text", ["11 7/6", "4 0/0", r"\frac{1}{0}", "1/0", "12:47", "x", "", "1e9999", "9" * 101])
def test_what_is_no_number_is_none(text):
    assert read_number(text) is None


@pytest.mark.parametrize(
    "text", ["28%", r"28\%", "28 percent", "28 pct", "28 percentage", "$28$ %", r"28\text{percent}"]
)
def test_a_percent_sign_is_read_in_all_its_forms(text):
    number = read_number(text)
    assert number.value == 28 and number.percent
