"""A fault is read strictly, and every mistake in it is said before anything starts."""

import ast
from pathlib import Path

import pytest

import spmd_rl
from spmd_rl.config.check import check
from spmd_rl.config.fault_spec import check_parameters, fault_problems, read_fault
from spmd_rl.config.loading import dump, load_config
from spmd_rl.config.names import Phase
from spmd_rl.config.resume_policy import resume_problems
from spmd_rl.controller.session import SCORING, UPDATING
from spmd_rl.distributed.status import RankStatus
from spmd_rl.errors import ConfigError


def config(*words):
    return load_config(["--model.path", "model", "--checkpoint.every_steps", "2", "--inject", *words])


def test_the_phases_are_those_that_are_timed():
    timed = {*SCORING.values(), *UPDATING.values()}
    for path in Path(spmd_rl.__file__).parent.rglob("*.py"):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name == "timed" and call.args and ast.unparse(call.args[0]).startswith("Phase."):
                timed.add(Phase[call.args[0].attr])
            elif name == "timed" and call.args and isinstance(call.args[0], ast.Constant):
                timed.add(call.args[0].value)
    assert timed == set(Phase) - {Phase.START, Phase.BETWEEN}


def test_a_fault_says_what_where_and_how(tmp_path):
    fault = read_fault("slow:rank=1,phase=rollout,step=3,verb=generate,doing=bucket,after=0.5,seconds=30")
    assert (fault.kind, fault.rank, fault.phase, fault.step, fault.after, fault.seconds) == (
        *("slow", 1, "rollout", 3),
        *(0.5, 30.0),
    )
    here = RankStatus(step=3, phase="rollout", verb="generate", doing="bucket 12")
    assert fault.fits(1, here)
    for rank, place in (
        (0, here),
        (1, RankStatus(step=2, phase="rollout", verb="generate", doing="bucket 12")),
        (1, RankStatus(step=3, phase="update", verb="generate", doing="bucket 12")),
        (1, RankStatus(step=3, phase="rollout", verb="", doing="bucket 12")),
        (1, RankStatus(step=3, phase="rollout", verb="generate")),
    ):
        assert not fault.fits(rank, place)


def test_what_is_left_out_is_anywhere():
    fault = read_fault("kill")
    assert all(
        fault.fits(rank, place) for rank in (0, 5) for place in (RankStatus(), RankStatus(7, "update", "learn", "x"))
    )
    assert read_fault("nan:rank=1").phase == "update"
    assert (read_fault("slow:reward,seconds=1").phase, read_fault("disk_full").verb) == ("rollout", "begin_checkpoint")


@pytest.mark.parametrize(
    "text, words",
    [
        ("kil:rank=1", "there is no kind of fault 'kil'; did you mean kill?"),
        ("", "there is no kind of fault ''; there are kill, stop, loop"),
        ("kill:rnk=1", "kill has no 'rnk'; did you mean rank?"),
        ("kill:seconds=1", "kill has no 'seconds'"),
        ("kill:rank=-1", "rank = -1: it must be a rank"),
        ("kill:rank=1.5", "rank = 1.5: it must be a rank"),
        ("kill:rank", "'rank' has no value"),
        ("kill:rank=1,", "'' has no value"),
        ("kill:rank=1,rank=2", "rank is given twice"),
        ("kill:phase=rolout", "phase = rolout: there is no such phase; did you mean rollout?"),
        ("slow:rank=1", "seconds is missing"),
        ("slow:seconds=nan", "seconds = nan: it must be seconds above 0"),
        ("slow:seconds=inf", "seconds = inf"),
        ("loop:reward", "'reward' has no value"),
        ("kill:reward,phase=adv", "phase = adv: nothing is graded then"),
        ("corrupt:bit=3", "param is missing"),
        ("corrupt:param=a,bit=3,side=engine", "side = engine: it must be training or rollout"),
        ("corrupt:param=a,bit=3,phase=rollout", "corrupt has no 'phase'"),
        ("nan:phase=adv", "phase = adv: nothing becomes nan there; it can be update, rollout, checkpoint"),
        ("nan:phase=rollout,of=loss", "of = loss: it is in phase update"),
    ],
)
def test_a_mistake_is_named_with_the_way_out(text, words):
    with pytest.raises(ValueError) as raised:
        read_fault(text)
    assert str(raised.value).startswith(f"inject = {text}: ") and words in str(raised.value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("kill:rank=2", "rank = 2: there are 2 ranks; it can be 0 to 1"),
        ("kill:rank=1,phase=adv", "rank 0 alone is in phase adv"),
        ("kill:step=101", "step = 101: the run ends after train.steps = 100"),
        ("corrupt:param=a,bit=16", "bit = 16: a bfloat16 has bits 0 to 15"),
        ("kil", "there is no kind"),
    ],
)
def test_what_this_run_has_not_is_said_too(text, words):
    [problem] = fault_problems(config(text), 2)
    assert words in str(problem)
    assert problem in check(config(text), 2, None)


def test_all_problems_come_at_once():
    assert len(fault_problems(config("kill:rank=2", "slow:reward,seconds=1", "kil", "kill:step=101"), 2)) == 3


def test_nothing_becomes_full_where_nothing_is_saved():
    quiet = load_config(["--model.path", "model", "--inject", "disk_full:step=3"])
    assert "set checkpoint.every_steps" in str(fault_problems(quiet, 2)[0])


def test_a_tensor_that_the_model_has_not_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match="no tensor 'model.layers.0.norm'; did you mean model.layers.0.inorm?"):
        check_parameters(config("corrupt:param=model.layers.0.norm,bit=1"), ["model.layers.0.inorm", "lm_head"])
    check_parameters(config("corrupt:param=lm_head,bit=1", "kill"), ["lm_head"])


def test_faults_stand_in_a_file_as_on_the_command_line_and_do_not_keep_a_run_from_going_on(tmp_path):
    given = config("kill:rank=1,phase=rollout,step=3", "slow:reward,seconds=30")
    (tmp_path / "config.yaml").write_text(dump(given))
    assert load_config(["--config", str(tmp_path / "config.yaml")]) == given
    (tmp_path / "short.yaml").write_text("model:\n  path: model\ninject:\n- kill:rank=1,step=3\n")
    assert load_config(["--config", str(tmp_path / "short.yaml")]).inject == ("kill:rank=1,step=3",)
    assert resume_problems({"inject": []}, {"inject": ["kill"]}, ()) == []


def test_a_critic_suffers_in_phases_of_its_own():
    assert read_fault("nan:phase=update_critic,of=loss").verb == "learn"
    (problem,) = fault_problems(config("nan:phase=update_critic"), 2)
    assert "phase = update_critic: algorithm.advantage = grpo has no critic" in str(problem)
    critic = load_config(
        ["--model.path", "model", "--algorithm.advantage", "gae", "--inject", "kill:phase=critic_model,rank=1"]
        + ["slow:phase=adv,rank=1,seconds=1", "nan:phase=update_critic"]
    )
    assert fault_problems(critic, 2) == []
