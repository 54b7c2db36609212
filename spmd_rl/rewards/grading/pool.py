"""Grading in processes that can be killed, beside whatever the caller is doing."""

import threading
from typing import Any, Self

import msgspec

from spmd_rl.data.tickets import SampleReward
from spmd_rl.distributed.status import current_status, set_status
from spmd_rl.rewards.grade import RewardSample
from spmd_rl.rewards.grading.fork_server import START_SECONDS
from spmd_rl.rewards.grading.lanes import Task
from spmd_rl.rewards.grading.supervisor import Supervisor
from spmd_rl.rewards.rule_table import SIGNATURE

_STATUS_SECONDS = 0.5
"""Graders that take longer are waited for by name, and so often looked at."""


class GraderPool:
    """Scores samples by weighted rules in processes: `submit` as responses finish, `collect` when convenient.

    Every rule has `timeout_seconds` of wall clock for every sample. One that takes longer has its process killed: it
    scores 0.0 with cause timeout, the sample's other rules and the other samples are graded all the same. A rule that
    raises, ends its process, or needs more than `memory_mib` of memory scores 0.0 with cause crash and is logged the
    first time. A timeout or crash is the sample's cause whatever the other rules say; otherwise that is the first cause
    a rule gives, or correct or wrong by the reward's sign when none does. A rule that returns None does not apply to
    the sample: neither its weight nor its score counts.

    The first call of a rule in a process may take `first_call_seconds`, where those are more, until it is known that it
    needs no longer than others: it may load a model then.

    Rules that take one sample are graded by `workers` processes. A rule that takes a list of samples has a process of
    its own, which is given up to `batch` samples a call (the call has `timeout_seconds`); an asynchronous rule has one
    too, which works on up to `batch` samples at once.

    A thread looks after the processes, so limits hold and grading goes on while nobody calls. Raises a ValueError when
    a rule can't be imported (here) or returns something that is no finite number (from `submit` and `collect`).
    """

    def __init__(
        self,
        rules: dict[str, float],
        workers: int = 1,
        timeout_seconds: float = 10.0,
        memory_mib: int = 0,
        batch: int = 64,
        first_call_seconds: float = 0.0,
    ) -> None:
        if not rules:
            raise ValueError(
                "reward.rules = {}: there is nothing to grade by; name at least one rule, as in math_answer: 1.0"
            )
        if workers < 1:
            raise ValueError(f"reward.workers = {workers}: grading needs a process; set it to 1 or more")
        if not timeout_seconds > 0:
            raise ValueError(f"reward.timeout_seconds = {timeout_seconds}: a rule needs time; set it above 0")
        if memory_mib < 0:
            raise ValueError(f"reward.memory_mib = {memory_mib}: set it to 0 (no limit) or more")
        if batch < 1:
            raise ValueError(f"reward.batch = {batch}: a rule is given at least one sample; set it to 1 or more")
        self._rules = dict(rules)
        self._supervisor = Supervisor(
            list(rules), workers, timeout_seconds, memory_mib, batch, first_call_seconds, self._keep_result
        )
        self._changed = threading.Condition()  # guards all that both threads touch, down to _closing
        self._submitted: list[Task] = []
        self._scored: list[SampleReward] = []
        self._unscored = 0
        self._busy_seconds = 0.0
        self._failure: Exception | None = None
        self._started = False
        self._closing = False

        self._thread = threading.Thread(target=self._run, name="graders", daemon=True)
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._started or self._failure)
        if self._failure:
            self.close()
            raise self._failure

    def submit(self, id: int, sample: RewardSample) -> None:
        """Have a sample graded; never waits."""
        try:
            task = Task(id, msgspec.Raw(msgspec.msgpack.encode(sample, enc_hook=_plain)))
        except (TypeError, OverflowError) as error:
            raise ValueError(
                f"sample {id} can't be sent to a grader process: {error}; leave that column out"
            ) from error
        with self._changed:
            self._check_usable()
            self._submitted.append(task)
            self._unscored += 1
        self._supervisor.wake()

    def try_rules(self, sample: RewardSample) -> None:
        """Grade a sample for which nothing is kept; a ValueError says which rules fail on it, how, and what to do."""
        self.submit(0, sample)
        [scored] = self.collect(block=True)
        if scored.cause not in ("crash", "timeout"):
            return
        failures = self._supervisor.failures
        text = "\n".join(failures.values())
        if scored.cause == "timeout":
            text += (
                "\nA rule that loads something when it is first called has it loaded beforehand, once, and within "
                f"{START_SECONDS:.0f} s, by a function `prepare()` of its module, or by one that is its own: "
                "judge.prepare = load. Or raise reward.first_call_seconds, or reward.timeout_seconds for every call"
            )
        raise ValueError(
            f"reward.rules: {', '.join(failures)} failed on the first prompt's own answer, as would be done all the "
            f"run: {text}\n({SIGNATURE})"
        )

    def collect(self, block: bool) -> list[SampleReward]:
        """Return the samples scored since the last call, as they were done; `block` waits for all submitted."""
        if not block and not self._scored and not self._failure:
            return []
        with self._changed:
            if block:
                self._wait()
            self._check_usable()
            scored, self._scored = self._scored, []
        return scored

    @property
    def busy_seconds(self) -> float:
        """Seconds spent inside rules so far, summed over processes and, where a rule is asynchronous, over samples."""
        return self._busy_seconds

    @property
    def graders(self) -> dict[int, int]:
        """Process -> how many samples it works on, as far as this thread can see."""
        return self._supervisor.graders

    def close(self) -> None:
        """Kill the processes and wait until they are gone; samples not yet scored are dropped. May be called twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._supervisor.wake()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self) -> None:
        """Wait until all are scored; the rank's status says what is waited for when that takes long."""
        outer = current_status().doing
        while not self._changed.wait_for(
            lambda: self._unscored == 0 or self._failure or self._closing, _STATUS_SECONDS
        ):
            doing = self._waited_for()
            if current_status().doing != doing:
                set_status(doing=doing)
        if current_status().doing != outer:
            set_status(doing=outer)

    def _waited_for(self) -> str:
        """Name the rule and the sample that a grader has been at for longest, and how many samples are not done."""
        oldest = self._supervisor.oldest()
        if oldest is None:
            return "reward workers are being started"
        process, task = oldest
        names = list(self._rules)
        rule = next((name for rule, name in enumerate(names) if rule not in task.results), names[-1])
        return f"reward {rule}, sample {task.id}, in process {process}; {self._unscored} samples are not done"

    def _check_usable(self) -> None:
        if self._failure:
            raise self._failure
        assert not self._closing, "the grader pool is closed"

    # What follows runs in the thread.

    def _run(self) -> None:
        try:
            self._supervisor.start(lambda: self._closing)
            with self._changed:
                self._started = True
                self._changed.notify_all()
            while not self._closing:
                with self._changed:
                    submitted, self._submitted = self._submitted, []
                self._supervisor.work(submitted)
        except Exception as error:
            with self._changed:  # told before the cleaning up, which must not keep a waiting caller from it
                self._failure = error
                self._changed.notify_all()
        finally:
            self._supervisor.close()
            with self._changed:
                self._changed.notify_all()

    def _keep_result(self, task: Task, seconds: float) -> None:
        with self._changed:
            self._busy_seconds += seconds
            if len(task.results) == len(self._rules):
                self._scored.append(task.reward(self._rules))
                self._unscored -= 1
                if self._unscored == 0:
                    self._changed.notify_all()


def _plain(value: Any) -> Any:
    """Return numpy's values in the words of msgpack."""
    if type(value).__module__ == "numpy":
        return value.item() if getattr(value, "ndim", None) == 0 else value.tolist()
    raise TypeError(f"its row holds a {type(value).__name__}, which is neither text, number, list nor dict")
