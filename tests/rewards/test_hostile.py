"""Whatever a model writes is graded, and nothing of it is carried out."""

import os
import re

import pytest
from sympy.parsing import sympy_parser

from spmd_rl.rewards.grade import RewardSample
from spmd_rl.rewards.grading.pool import GraderPool
from spmd_rl.rewards.math_equality.algebra import prepare
from spmd_rl.rewards.rules.math_answer import is_correct

GOLDS = ("42", "x+1", r"\frac{1}{2}", "(1,2)", "cat", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}")
# Each would make the file {marker}.
CALLS = (
    "__import__('os').system('touch {marker}')",
    "(lambda: open('{marker}', 'w'))()",
    "open('{marker}','w')",
    "().__class__.__base__.__subclasses__()[0].__init__.__globals__['open']('{marker}','w')",
    "f\"{{open('{marker}', 'w')}}\"",
    "exec(\"open('{marker}','w')\")",
    "42 if open('{marker}','w') else 42",
    "[42 for _ in [open('{marker}','w')]]",
    "$(touch {marker})",
    "`touch {marker}`",
    "42; touch {marker}",
    r"\input{{|touch {marker}}}",
    r"\immediate\write18{{touch {marker}}}",
    "1+open('{marker}','w').close()",
    "3*(4)+__import__('pathlib').Path('{marker}').touch()",
)
FRAMES = (r"\boxed{{{0}}}", "The answer is {0}", "${0}$", r"\[ x = {0} \]", "{0}", "#### {0}", "<answer>{0}</answer>")
HEAVY = (
    r"\boxed{9^{9^{9^{9}}}}",
    "The answer is 9**9**9**9**9",
    "9^9^9^9^9^9 + 1",
    r"\boxed{(10^{10^{10}})!}",
    r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}",
    r"\boxed{" + r"\frac{1}{" * 300 + "2" + "}" * 300 + "}",
    "\x00\ud7ff\u202e" * 100 + r"\boxed{\x}",
)


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "carried_out"


def test_these_calls_would_be_carried_out_by_what_evaluates_them(marker):
    eval(CALLS[0].format(marker=marker))
    assert marker.exists()
    marker.unlink()
    sympy_parser.parse_expr(CALLS[2].format(marker=marker))
    assert marker.exists(), "sympy's own parser evaluates names that Python has built in"


@pytest.mark.long
def test_no_response_reaches_a_shell_or_more_of_python_than_digits_and_operators(marker, monkeypatch):
    prepare()
    from math_verify import parser

    given, evaluated, parse = [], [], parser.parse_expr
    monkeypatch.setattr(parser, "parse_expr", lambda text, **options: given.append(text) or parse(text, **options))
    monkeypatch.setattr(
        sympy_parser, "eval", lambda code, *scopes: evaluated.append(code) or eval(code, *scopes), raising=False
    )
    monkeypatch.setattr(os, "system", lambda command: pytest.fail(f"a shell was asked to {command}"))
    is_correct("7/2", "so 3+1/2")  # this much math-verify does leave to sympy
    for call in CALLS:
        for frame in FRAMES:
            response = frame.format(call.format(marker=marker))
            for gold in GOLDS:
                assert is_correct(gold, response).score == 0.0 or gold == "42", (gold, response)
    assert not marker.exists()
    assert given and all(re.fullmatch(r"[0-9.\s+\-*/^()×÷]*", text) for text in given), given
    names = {name for code in evaluated if hasattr(code, "co_names") for name in code.co_names}
    assert names <= {"Integer", "Float", "Rational", "Add", "Mul", "Pow"}, names


@pytest.mark.long
def test_grader_processes_survive_hostile_and_heavy_responses_and_go_on(marker):
    with GraderPool({"math_answer": 1.0}, timeout_seconds=1.5, memory_mib=2048) as pool:
        responses = [frame.format(call.format(marker=marker)) for call in CALLS for frame in FRAMES[:2]]
        for number, response in enumerate((*responses, *HEAVY, r"\boxed{42}")):
            pool.submit(number, RewardSample(prompt="", response=response, answer="41+1" if number % 2 else "42"))
        scored = {score.id: score for score in pool.collect(block=True)}
    assert scored[len(scored) - 1].reward == 1.0
    assert {score.cause for score in scored.values()} <= {"correct", "wrong", "unparsed", "timeout", "crash"}
    assert not marker.exists()
