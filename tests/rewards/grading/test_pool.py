import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deadlines import crowding
from spmd_rl.rewards.grade import RewardSample
from spmd_rl.rewards.grading.pool import GraderPool

REPOSITORY = Path(__file__).resolve().parents[2]

RULES = '''
import os, subprocess, sys, time
from spmd_rl.rewards.grade import Grade

def obey(sample):
    """Does what the response says."""
    word, _, rest = sample.response.partition(" ")
    if word == "sleep": time.sleep(1000)
    if word == "count": 3 ** (10 ** 9)  # one call into C that holds the interpreter's lock
    if word == "raise": raise KeyError("what a rule")
    if word == "exit": sys.exit(0)
    if word == "vanish": os._exit(7)
    if word == "abort": os.abort()
    if word == "print": print("x" * 100_000, flush=True); os.write(1, b"raw bytes")
    if word == "read": return float(len(sys.stdin.read()))
    if word == "spawn":
        child = subprocess.Popen(["sleep", "1000"])
        open(rest, "w").write(f"{os.getpid()} {child.pid}")
        time.sleep(1000)
    if word == "meet":
        mine, other = rest.split()
        open(mine, "w").close()
        while not os.path.exists(other): time.sleep(0.01)
    if word == "return": return eval(rest)
    if word == "modules": return float(sum(m in sys.modules for m in ("torch", "vllm", "transformers", "numpy")))
    if word == "threads": return float(os.environ["OMP_NUM_THREADS"])
    if word == "row": return float(sample.row["weight"])
    return Grade(1.0, "correct")

async def ask(sample):
    """Does what the response says, as a rule that asks a server would."""
    import asyncio
    word, _, rest = sample.response.partition(" ")
    if word == "hang": await asyncio.sleep(1000)
    if word == "block": time.sleep(1000)
    if word == "raise": raise OSError("no server")
    if word == "vanish": os._exit(7)
    if word == "meet":
        open(f"{rest}/{os.getpid()}-{id(sample)}", "w").close()
        while len(os.listdir(rest)) < 5: await asyncio.sleep(0.01)
    return 0.25

def together(samples, short=False):
    """Each sample's score is how many came with it."""
    words = [sample.response.split()[0] for sample in samples]
    if "sleep" in words: time.sleep(1000)
    if "raise" in words: raise KeyError("one of them")
    if "vanish" in words: os._exit(7)
    return [float(len(samples))] * (len(samples) - short)

async def together_later(samples):
    import asyncio
    await asyncio.sleep(1000 if any(s.response == "sleep" for s in samples) else 0)
    return [0.75 for sample in samples]

def trl(completions, **kwargs): return [1.0 for _ in completions]
def trl_too(prompts, completions, **kwargs): return [1.0 for _ in completions]
def trl_counts(completions=None, **kwargs): return [1.0] * 3
def verl(data_source, solution_str, ground_truth, extra_info=None): return 1.0
def lazy(sample): time.sleep(1000)
def only_sums(sample): return None if "+" not in sample.prompt else 0.5
def some_of(samples): return [None if sample.response == "skip" else 2.0 for sample in samples]
async def later_none(sample): return None
def ids(sample): return sample.prompt_ids[0] + sample.response_ids[1]
def hungry(sample): return float(len(bytearray(2**31 if sample.response == "much" else 1)) > 0)
def hang_in_c(sample): return float(len(str(7 ** (10 ** 9))) if sample.response == "hang" else 1)
def other(sample): return 0.5
def judge(sample): return Grade(0.0, "unparsed")
'''


@pytest.fixture
def rules(tmp_path):
    path = tmp_path / "rules.py"
    path.write_text(RULES)
    return lambda function: f"{path}:{function}"


@pytest.fixture
def pool(rules):
    """A pool with more time than a busy machine needs."""
    with GraderPool({rules("obey"): 1.0}, workers=2, timeout_seconds=60.0) as pool:
        yield pool


@pytest.fixture
def hasty(rules):
    """A pool with little time, as tests that wait for its end want it."""
    with GraderPool({rules("obey"): 1.0}, workers=2, timeout_seconds=short(0.5)) as pool:
        yield pool


def short(seconds: float) -> float:
    """Return what is soon over, and yet enough for a rule that does nothing, however busy the machine is."""
    return seconds * crowding()


def grade(pool, *responses, **fields):
    for number, response in enumerate(responses):
        pool.submit(number, RewardSample("q", response, "a", **fields))
    return sorted(pool.collect(block=True), key=lambda scored: scored.id)


def alive(pid: int) -> bool:
    """Return whether a process runs or is a zombie."""
    return Path(f"/proc/{pid}").exists()


def wait_until(true, seconds=60.0):
    deadline = time.monotonic() + seconds * crowding()
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def processes(pool) -> list[int]:
    return list(pool.graders)


def test_many_samples_come_back_each_once_with_their_own_verdict(pool):
    values = [i % 7 for i in range(300)]
    scored = grade(pool, *[f"return {v}" for v in values])
    assert [s.id for s in scored] == list(range(300))
    assert [s.reward for s in scored] == [float(v) for v in values]
    assert pool.collect(block=True) == pool.collect(block=False) == []


def test_collecting_without_blocking_returns_at_once(pool):
    pool.submit(1, RewardSample("q", "sleep", "a"))
    assert pool.collect(block=False) == [], "who had waited would have a verdict"


def test_several_samples_are_graded_at_once(pool, tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    assert [s.cause for s in grade(pool, f"meet {a} {b}", f"meet {b} {a}")] == ["correct", "correct"]


@pytest.mark.parametrize("how", ["sleep", "count"])
def test_a_rule_that_takes_too_long_is_killed_and_the_other_verdicts_stand(hasty, how, caplog):
    before = processes(hasty)
    scored = grade(hasty, "fine", how, "fine", "fine")
    assert [(s.reward, s.cause) for s in scored] == [
        (1.0, "correct"),
        (0.0, "timeout"),
        (1.0, "correct"),
        (1.0, "correct"),
    ]
    assert hasty.busy_seconds >= 0.5
    killed = set(before) - set(processes(hasty))
    assert len(killed) == 1 and wait_until(lambda: not any(map(alive, killed)))
    assert "reward.timeout_seconds = " in caplog.text


def test_limits_hold_while_nobody_collects(hasty):
    before = processes(hasty)
    hasty.submit(0, RewardSample("q", "sleep", "a"))
    hasty.submit(1, RewardSample("q", "sleep", "a"))
    assert wait_until(lambda: not any(map(alive, before)))


def test_what_a_rule_started_is_killed_with_it(hasty, tmp_path):
    assert grade(hasty, f"spawn {tmp_path}/pids")[0].cause == "timeout"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert wait_until(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid: int) -> bool:
    # A killed grandchild is init's to reap, and a container may have an init that doesn't.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_rules_after_a_killed_one_still_give_their_score(rules):
    with GraderPool(
        {rules("other"): 1.0, rules("obey"): 1.0, rules("judge"): 1.0, "exact": 2.0}, 1, short(0.5)
    ) as pool:
        (scored,) = grade(pool, "sleep")
        assert scored.cause == "timeout" and scored.reward == 0.5
        assert list(scored.scores.values()) == [0.5, 0.0, 0.0, 0.0] and list(scored.scores)[3] == "exact"
        pool.submit(9, RewardSample("q", "fine", "fine"))
        assert [(s.cause, s.reward) for s in pool.collect(block=True)] == [("correct", 3.5)]


def test_the_answer_that_a_rule_found_comes_with_the_score(rules):
    with GraderPool({rules("other"): 1.0, "math_answer": 1.0}) as pool:
        pool.submit(1, RewardSample("q", "So it is \\boxed{7}.", "8"))
        assert [(s.extracted, s.cause) for s in pool.collect(block=True)] == [("7", "wrong")]


def test_the_cause_is_that_of_the_first_rule_that_gives_one_or_the_rewards_sign(rules):
    with GraderPool({rules("other"): 1.0, rules("judge"): 1.0, rules("obey"): 1.0}) as pool:
        assert grade(pool, "fine")[0].cause == "unparsed"
        assert grade(pool, "raise")[0].cause == "crash"
    with GraderPool({rules("obey"): 1.0, "format": 0.1}) as pool:
        assert [s.cause for s in grade(pool, "return 0", "return 1", "return -1")] == ["wrong", "correct", "wrong"]


def test_a_rule_that_raises_is_a_crash_and_its_traceback_is_logged_once(pool, caplog):
    with caplog.at_level(logging.WARNING):
        scored = grade(pool, "raise", "fine", "raise", "exit")
    assert [(s.reward, s.cause) for s in scored] == [(0, "crash"), (1, "correct"), (0, "crash"), (0, "crash")]
    assert caplog.text.count("Traceback") == 1 and "what a rule" in caplog.text and "rules.py:obey" in caplog.text


@pytest.mark.parametrize("how, ended", [("vanish", "exited with code 7"), ("abort", "was ended by signal SIGABRT")])
def test_a_rule_that_ends_its_process_is_a_crash_and_grading_goes_on(pool, caplog, how, ended):
    assert [s.cause for s in grade(pool, "fine", how, "fine", how, "fine")] == ["correct", "crash"] * 2 + ["correct"]
    assert caplog.text.count(ended) == 1


def test_what_a_rule_prints_or_reads_does_not_disturb_the_grading(pool):
    assert [s.reward for s in grade(pool, "print", "fine", "read", "print")] == [1.0, 1.0, 0.0, 1.0]


def test_a_response_longer_than_a_pipe_arrives_whole(pool):
    assert [s.reward for s in grade(pool, "return len(sample.response) " + " " * 2_000_000)] == [2_000_028.0]


def test_a_rule_that_returns_none_does_not_count_for_that_sample_and_the_others_do(rules):
    some = {rules("only_sums"): 2.0, rules("some_of"): 1.0, rules("later_none"): 5.0}
    with GraderPool(some) as pool:
        for number, (prompt, response) in enumerate([("1+1", "x"), ("1+1", "skip"), ("1", "x"), ("1", "skip")]):
            pool.submit(number, RewardSample(prompt, response, "a"))
        scored = sorted(pool.collect(block=True), key=lambda one: one.id)
    assert [one.reward for one in scored] == [3.0, 1.0, 2.0, 0.0]
    assert [len(one.scores) for one in scored] == [2, 1, 1, 0]
    assert [one.cause for one in scored] == ["correct", "correct", "correct", "unjudged"]


@pytest.mark.parametrize(
    "rule, said",
    [
        ("trl", ["TypeError", "TRL's", "trl:my_rules.py:judge"]),
        ("trl_too", ["TypeError", "TRL's", "trl:my_rules.py:judge"]),
        ("trl_counts", ["[1.0, 1.0, 1.0]", "TRL's"]),
        ("verl", ["missing 2 required positional arguments", "verl's", "verl:my_rules.py:compute_score"]),
        ("lazy", ["took longer than reward.timeout_seconds = 0.5", "judge.prepare = load"]),
        ("hang_in_c", []),
    ],
)
def test_a_rule_that_fails_on_the_first_prompts_answer_is_told_with_what_it_should_be(rules, rule, said):
    with GraderPool({"exact": 1.0, rules(rule): 1.0}, timeout_seconds=0.5 if rule == "lazy" else 60.0) as pool:
        if not said:
            pool.try_rules(RewardSample("q", "7", "7"))
            return
        with pytest.raises(ValueError) as error:
            pool.try_rules(RewardSample("q", "7", "7"))
    assert all(words in str(error.value) for words in (*said, rules(rule)))


@pytest.mark.parametrize("value", ["float('nan')", "float('-inf')", "'good'", "Grade('1')"])
def test_a_return_value_that_is_no_number_stops_the_run(pool, rules, value):
    pool.submit(0, RewardSample("q", f"return {value}", "a"))
    with pytest.raises(ValueError) as error:
        pool.collect(block=True)
    assert rules("obey") in str(error.value) and "returned" in str(error.value)
    with pytest.raises(ValueError):
        pool.submit(1, RewardSample("q", "fine", "a"))
    assert wait_until(lambda: not any(map(alive, processes(pool))))


def test_a_rule_that_cannot_be_imported_is_named_before_anything_is_graded(rules):
    with pytest.raises(ValueError, match="rules.py:nobody' is not a rule that can be used.*has no function 'nobody'"):
        GraderPool({"exact": 1.0, rules("nobody"): 1.0}, workers=2)


def test_a_module_that_ends_the_process_when_imported_is_reported(tmp_path):
    (tmp_path / "gone.py").write_text("import os; os._exit(5)")
    with pytest.raises(ValueError, match="gone.py:f.*exited with code 5 while it imported"):
        GraderPool({f"{tmp_path}/gone.py:f": 1.0})


@pytest.mark.parametrize(
    "arguments, knob",
    [
        (({}, 1, 1.0), "reward.rules = {}"),
        (({"exact": 1.0}, 0, 1.0), "reward.workers = 0"),
        (({"exact": 1.0}, 1, 0.0), "reward.timeout_seconds = 0.0"),
    ],
)
def test_a_pool_that_could_not_grade_is_refused(arguments, knob):
    with pytest.raises(ValueError, match=knob):
        GraderPool(*arguments)


def test_a_grader_process_is_light_and_keeps_to_one_thread(pool):
    assert [s.reward for s in grade(pool, "modules", "threads")] == [0.0, 1.0]


def test_a_row_reaches_the_rule_with_numpys_numbers_as_pythons_and_nothing_it_cannot_carry(pool):
    import numpy as np

    assert grade(pool, "row", row={"weight": np.float32(0.25), "ids": np.arange(3)})[0].reward == 0.25
    with pytest.raises(ValueError, match="sample 3 can't be sent.*holds a object"):
        pool.submit(3, RewardSample("q", "row", "a", row={"weight": object()}))


def test_no_process_is_left_after_close(rules):
    pool = GraderPool({rules("obey"): 1.0}, workers=3, timeout_seconds=60.0)
    pids = processes(pool)
    assert len(pids) == 3 and all(map(alive, pids))
    for i in range(10):
        pool.submit(i, RewardSample("q", "count", "a"))
    pool.close()
    pool.close()
    assert not any(map(alive, pids))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent was killed")
@pytest.mark.parametrize("word", ["fine", "sleep", "count"])
def test_no_process_is_left_when_the_parent_is_killed(rules, word):
    program = (
        "import sys, time\n"
        "from spmd_rl.rewards.grading.pool import GraderPool\n"
        "from spmd_rl.rewards.grade import RewardSample\n"
        "pool = GraderPool({sys.argv[1]: 1.0}, workers=2, timeout_seconds=600)\n"
        "for i in range(2): pool.submit(i, RewardSample('q', sys.argv[2], 'a'))\n"
        "print(*pool.graders, flush=True)\n"
        "time.sleep(1000)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, rules("obey"), word], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(map(_runs, pids))
    time.sleep(0.2)  # the rule is running now
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert wait_until(lambda: not any(map(_runs, pids)))


def scored(pool, *responses):
    return [(s.reward, s.cause) for s in grade(pool, *responses)]


def test_asynchronous_gradings_overlap_in_one_process(rules, tmp_path):
    with GraderPool({rules("ask"): 1.0}, workers=1, timeout_seconds=60.0, batch=5) as pool:
        assert len(processes(pool)) == 1
        (tmp_path / "here").mkdir()
        assert scored(pool, *[f"meet {tmp_path}/here"] * 5) == [(0.25, "correct")] * 5


def test_an_asynchronous_grading_that_hangs_blocks_raises_or_vanishes_costs_its_own_score_only(rules):
    with GraderPool({rules("ask"): 1.0}, workers=1, timeout_seconds=short(0.5)) as pool:
        fine, late, crash = (0.25, "correct"), (0.0, "timeout"), (0.0, "crash")
        assert scored(pool, "fine", "hang", "fine", "raise") == [fine, late, fine, crash]
        assert scored(pool, "fine", "block", "fine") == [fine, late, fine]
        assert scored(pool, "fine", "fine", "vanish") == [fine, fine, crash]
        assert scored(pool, "fine") == [fine]


@pytest.mark.parametrize("word, cause", [("sleep", "timeout"), ("raise", "crash"), ("vanish", "crash")])
def test_a_batch_with_one_bad_sample_does_not_lose_the_others(rules, word, cause):
    with GraderPool({rules("together"): 1.0}, timeout_seconds=short(0.5) if word == "sleep" else 60.0, batch=8) as pool:
        assert scored(pool, "a", "b", word, "c") in ([(1.0, "correct")] * 2 + [(0.0, cause), (1.0, "correct")],)


def test_a_rule_for_lists_is_given_what_waits_up_to_the_batch(rules):
    with GraderPool({"exact": 0.0, rules("together"): 1.0, rules("other"): 1.0}, batch=4) as pool:
        found = [s.scores[rules("together")] for s in grade(pool, *"abcdefghijkl")]
        assert max(found) <= 4.0 and sum(1 / size for size in found) < 12
        assert [s.scores[rules("other")] for s in grade(pool, "a", "b")] == [0.5, 0.5]


def test_a_rule_for_lists_that_returns_too_few_stops_the_run(rules):
    name = f"{rules('together')}(short=true)"
    with GraderPool({name: 1.0}) as pool:
        pool.submit(0, RewardSample("q", "x", "a"))
        with pytest.raises(ValueError, match="returned 0 values for 1 samples"):
            pool.collect(block=True)


def test_an_asynchronous_rule_for_lists_is_stopped_when_it_takes_too_long(rules):
    with GraderPool({rules("together_later"): 1.0}, timeout_seconds=short(0.5)) as pool:
        assert scored(pool, "a", "sleep", "b") == [(0.75, "correct"), (0.0, "timeout"), (0.75, "correct")]


def test_tokens_reach_the_rule(rules):
    with GraderPool({rules("ids"): 1.0}) as pool:
        assert grade(pool, "x", prompt_ids=[3, 4], response_ids=[5, 6])[0].reward == 9.0


def test_a_rule_that_exhausts_the_memory_is_a_crash_and_grading_goes_on(rules, caplog):
    with GraderPool({rules("hungry"): 1.0, rules("other"): 1.0}, memory_mib=512) as pool:
        assert scored(pool, "a", "much", "b") == [(1.5, "correct"), (0.5, "crash"), (1.5, "correct")]
    assert "reward.memory_mib = 512" in caplog.text


def test_hangs_in_c_and_in_sympy_cost_no_other_verdict(rules):
    hang = r"\boxed{9^{9^{9^{9^{9}}}} - x}"
    with GraderPool({"math_answer": 1.0, rules("hang_in_c"): 0.5}, workers=2, timeout_seconds=short(0.5)) as pool:
        for number in range(200):
            response = {50: hang, 100: "hang"}.get(number, str(number))
            pool.submit(number, RewardSample("q", response, "x" if response == hang else str(number)))
        found = {s.id: (s.reward, s.cause) for s in pool.collect(block=True)}
    assert found.pop(50) == (0.5, "timeout") and found.pop(100) == (0.0, "timeout")
    assert set(found.values()) == {(1.5, "correct")} and len(found) == 198


def test_the_answer_that_was_found_comes_back_with_the_score():
    with GraderPool({"format": 0.5, "math_answer": 1.0}) as pool:
        assert [s.extracted for s in grade(pool, "So 7", "")] == ["7", None]


LAZY = """
import os, time
from pathlib import Path
LOG = Path(__file__).with_name("log")
loaded, calls = False, 0

def said(word):
    with LOG.open("a") as log: log.write(f"{word} {os.getpid()}\\n")

def load(seconds=1.2):
    global loaded
    if not loaded: said("loads"); time.sleep(seconds); loaded = True

def lazy(sample):
    load()
    if sample.response == "hang": time.sleep(1000)
    return 1.0

def lazy_list(samples): return [lazy(sample) for sample in samples]

async def lazy_later(sample):
    load()
    return 1.0

def quick(sample):
    if sample.response == "hang": time.sleep(1000)
    return 1.0

def always_slow(sample): time.sleep(1.2); return 1.0

def hopeless(sample): time.sleep(1000)
"""


@pytest.fixture
def lazy(tmp_path):
    """function -> its name as a rule, of a file without `prepare`; and one with it."""
    plain, prepared = tmp_path / "plain.py", tmp_path / "prepared.py"
    plain.write_text(LAZY)
    prepared.write_text(LAZY + "\ndef prepare(): load(2.0)\n")
    return lambda function, module="plain": f"{tmp_path / module}.py:{function}"


@pytest.mark.long
@pytest.mark.parametrize("rule", ["lazy", "lazy_list", "lazy_later"])
def test_a_rule_that_loads_when_first_called_passes_the_trial_and_grades_in_every_new_process(lazy, rule):
    with GraderPool({lazy(rule): 1.0}, 2, short(0.5), batch=2, first_call_seconds=60.0) as pool:
        pool.try_rules(RewardSample("q", "7", "7"))
        assert [one.cause for one in grade(pool, *"abcdef")] == ["correct"] * 6
        if rule == "lazy":  # what replaces a killed process loads again, and has the time for it
            causes = [one.cause for one in grade(pool, "hang", *"abcd", "hang", *"abcd")]
            assert causes == ["timeout", *["correct"] * 4] * 2


@pytest.mark.long
def test_a_first_call_of_several_samples_may_load_too(lazy):
    with GraderPool({lazy("lazy_list"): 1.0}, 1, short(0.5), batch=4, first_call_seconds=10.0) as pool:
        causes = [one.cause for one in grade(pool, *"abcd", "hang", *"efg")]
    assert causes == ["correct"] * 4 + ["timeout"] + ["correct"] * 3


def test_a_rule_that_loads_nothing_keeps_to_its_time_after_many_calls(lazy):
    with GraderPool({lazy("quick"): 1.0}, 1, short(0.3), first_call_seconds=600.0) as pool:
        grade(pool, *"abcdefgh")
        scored = grade(pool, "hang", "a", "hang", "hang", "b", "hang")
        assert pool.busy_seconds < 600.0, "none had the time of a first call"
    assert [one.cause for one in scored].count("timeout") == 4


def test_a_first_call_that_hangs_costs_its_time_once_and_then_a_call_is_a_call(lazy, caplog):
    with GraderPool({lazy("hopeless"): 1.0}, 1, 0.3, first_call_seconds=0.8) as pool:
        scored = grade(pool, *"abcd")
        assert pool.busy_seconds == pytest.approx(0.8 + 3 * 0.3, abs=0.1)
    assert [one.cause for one in scored] == ["timeout"] * 4
    assert "took longer than reward.first_call_seconds = 0.8" in caplog.text


@pytest.mark.long
def test_a_rule_that_is_always_too_slow_ends_in_timeouts(lazy):
    with GraderPool({lazy("always_slow"): 1.0}, 1, 0.3, first_call_seconds=10.0) as pool:
        causes = [one.cause for one in grade(pool, *"abcdefghij")]
    assert causes == ["correct", "timeout"] * 3 + ["timeout"] * 4, "the first might have loaded something"


def test_a_rule_that_loads_nothing_has_no_longer_than_any_call_when_its_process_is_replaced(lazy):
    with GraderPool({lazy("quick"): 1.0}, 1, 0.3, first_call_seconds=60.0) as pool:
        pool.try_rules(RewardSample("q", "7", "7"))
        scored = grade(pool, "hang", "hang", "hang")
        assert pool.busy_seconds == pytest.approx(3 * 0.3, abs=0.1)
    assert [one.cause for one in scored] == ["timeout"] * 3


@pytest.mark.long
@pytest.mark.parametrize("rules", [["lazy"], ["lazy", "quick"], ["lazy_list", "lazy"]])
def test_a_modules_prepare_runs_once_for_all_processes_and_not_on_a_rules_clock(lazy, tmp_path, rules):
    with GraderPool({lazy(rule, "prepared"): 1.0 for rule in rules}, 2, short(0.5)) as pool:
        pool.try_rules(RewardSample("q", "7", "7"))
        assert {one.cause for one in grade(pool, *"abcdef")} == {"correct"}
    assert (tmp_path / "log").read_text().count("loads") == 1


def test_a_rule_with_options_is_prepared_too_and_a_helper_that_needs_arguments_is_no_preparation(lazy, tmp_path):
    path = tmp_path / "helper.py"
    path.write_text("def prepare(text): raise KeyError\ndef judge(sample, scale: float = 1.0): return scale\n")
    rules = {f"{path}:judge(scale=2)": 1.0, f"{lazy('lazy', 'prepared')}()": 1.0}
    with GraderPool(rules, 1, short(0.5)) as pool:
        assert [one.reward for one in grade(pool, "a")] == [3.0]


def test_a_preparation_that_raises_is_told_with_its_traceback(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("def prepare(): raise OSError('no such model')\ndef judge(sample): return 1.0\n")
    with pytest.raises(ValueError, match="in prepare.*\n.*\n?.*no such model"):
        GraderPool({f"{path}:judge": 1.0})
