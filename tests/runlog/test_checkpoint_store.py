"""Laws of a run's checkpoints on disk; what the ranks write is stood for by small files."""

import contextlib
import json
import math
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from spmd_rl.config.config import CheckpointConfig
from spmd_rl.data.digests import digests_of
from spmd_rl.runlog.checkpoint_store import FILES, LATEST, STATE, CheckpointStore


def save(checkpoints, step, **metrics):
    partial = checkpoints.begin(step, expected_bytes=100)
    (partial / "weights").mkdir()
    (partial / "weights" / "part.bin").write_bytes(os.urandom(1000))
    return checkpoints.complete(step, digests_of(partial, checkpoints.seal(step, {"metrics": metrics})))


def steps(checkpoints):
    return [saved.step for saved in checkpoints.found()]


def test_the_newest_is_found_with_its_state(tmp_path):
    checkpoints = CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(keep_last=3))
    assert checkpoints.newest_whole(digests_of) == (None, [])
    for step in (1, 2, 10):
        save(checkpoints, step, reward=step / 2)
    found, problems = checkpoints.newest_whole(digests_of)
    assert found.step == 10 and problems == [] and found.state() == {"step": 10, "metrics": {"reward": 5.0}}
    assert (tmp_path / "checkpoints" / LATEST).read_text() == "step_000010\n"


def test_an_unfinished_one_is_never_found_and_goes_with_the_next(tmp_path):
    checkpoints = CheckpointStore(tmp_path, CheckpointConfig())
    save(checkpoints, 1)
    partial = checkpoints.begin(2, 100)
    (partial / "part.bin").write_bytes(b"half")
    assert steps(checkpoints) == [1]
    save(checkpoints, 3)
    assert steps(checkpoints) == [1, 3] and not partial.exists()


@pytest.mark.parametrize("kept", range(10))
def test_a_kill_at_any_moment_of_completing_leaves_a_whole_one(tmp_path, monkeypatch, kept):
    """The file system's calls succeed `kept` times, then the process is gone."""
    checkpoints = CheckpointStore(tmp_path, CheckpointConfig(keep_last=1))
    save(checkpoints, 1)
    left = [kept]

    def counted(original):
        def call(*arguments, **options):
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            return original(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for module, name in ((os, "fsync"), (os, "rename"), (shutil, "rmtree")):
            patch.setattr(module, name, counted(getattr(module, name)))
        with suppress(KeyboardInterrupt):
            save(checkpoints, 2)
    again = CheckpointStore(tmp_path, CheckpointConfig(keep_last=1))
    for step, names in again.sealed().items():
        again.adopt(step, digests_of(tmp_path / f"step_{step:06d}.partial", names))
    found, problems = again.newest_whole(digests_of)
    assert found is not None and problems == [] and found.step == (2 if kept else 1), "sealed by its last write"
    save(again, 3)
    assert steps(again) == [3] and not list(tmp_path.glob("*.partial"))


def sealed(tmp_path):
    """A store with a whole step 1, and step 2 as a run leaves it that dies when all ranks have written."""
    checkpoints = CheckpointStore(tmp_path, CheckpointConfig(keep_last=1))
    save(checkpoints, 1)
    partial = checkpoints.begin(2, 100)
    (partial / "weights").mkdir()
    (partial / "weights" / "part.bin").write_bytes(os.urandom(1000))
    (partial / "random_00000.json").write_text("{}")
    checkpoints.seal(2, {"metrics": {}})
    return checkpoints, partial


def test_one_that_was_sealed_is_adopted_and_no_other_goes_for_it(tmp_path):
    checkpoints, partial = sealed(tmp_path)
    [(step, names)] = checkpoints.sealed().items()
    assert step == 2 and names == ["random_00000.json", STATE, "weights/part.bin"]
    saved = checkpoints.adopt(2, digests_of(partial, names))
    assert checkpoints.problems(saved, digests_of) == [] and (tmp_path / LATEST).read_text() == "step_000002\n"
    assert steps(checkpoints) == [1, 2] and checkpoints.sealed() == {}, "pruning waits for the next save"


def harm(partial):
    """By name: what a crash of the machine, or somebody, may do to a directory that was sealed."""
    part, names = partial / "weights" / "part.bin", partial / FILES
    return {
        "a part is gone": part.unlink,
        "a part is short": lambda: part.write_bytes(part.read_bytes()[:-1]),
        "a part is empty": lambda: part.write_bytes(b""),
        "a part that nobody listed": lambda: (partial / "weights" / "other.bin").write_bytes(b"x"),
        "zeros for JSON": lambda: (partial / "random_00000.json").write_bytes(bytes(2)),
        "half a list": lambda: names.write_text(names.read_text()[:-9]),
        "no list": names.unlink,
        "an empty list": lambda: names.write_text("{}"),
        "another list": lambda: names.write_text("[1]"),
        "no state": (partial / STATE).unlink,
        "another step": lambda: partial.rename(partial.with_name("step_000003.partial")),
        "its name is taken": partial.with_suffix("").mkdir,
    }


@pytest.mark.parametrize("what", list(harm(Path("step_000002.partial"))))
def test_one_of_which_anything_is_missing_never_gets_a_name(tmp_path, what):
    checkpoints, partial = sealed(tmp_path)
    assert list(checkpoints.sealed()) == [2]
    harm(partial)[what]()
    assert checkpoints.sealed() == {}


def test_one_that_was_never_sealed_never_gets_a_name(tmp_path):
    checkpoints, partial = sealed(tmp_path)
    other = checkpoints.begin(3, 100)
    (other / "part.bin").write_bytes(b"whole, and nobody says so")
    (other / STATE).write_text(json.dumps({"step": 3}))
    assert checkpoints.sealed() == {}


def test_what_is_kept_is_the_last_ones_every_nth_and_the_best(tmp_path):
    checkpoints = CheckpointStore(tmp_path, CheckpointConfig(keep_last=2, keep_every=4, keep_best="eval/sums/accuracy"))
    for step in range(1, 11):
        save(checkpoints, step, **{"eval/sums/accuracy": 1.0 if step in (3, 7) else 0.5})
    assert steps(checkpoints) == [3, 4, 8, 9, 10]
    smallest = CheckpointStore(tmp_path / "loss", CheckpointConfig(keep_last=1, keep_best="-loss"))
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        save(smallest, step, loss=loss)
    assert steps(smallest) == [2, 3]


@pytest.mark.parametrize("no_number", [math.nan, math.inf, None, "high"])
def test_what_is_no_number_is_nobodys_best(tmp_path, no_number):
    checkpoints = CheckpointStore(tmp_path, CheckpointConfig(keep_last=1, keep_best="reward"))
    for step, reward in ((1, no_number), (2, 0.9), (3, 0.1), (4, no_number)):
        save(checkpoints, step, reward=reward)
    assert steps(checkpoints) == [2, 4]


def test_what_can_not_be_tidied_up_does_not_undo_a_complete_one(tmp_path, monkeypatch):
    checkpoints = CheckpointStore(tmp_path, CheckpointConfig(keep_last=1))
    save(checkpoints, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "_point_to", full)
        assert save(checkpoints, 2).step == 2
    assert steps(checkpoints) == [2], "older ones went, for the room that is missing"
    assert "step_000002 is complete, but" in checkpoints.untidy and "No space left" in checkpoints.untidy
    save(checkpoints, 3)
    assert checkpoints.untidy == "" and (tmp_path / LATEST).read_text() == "step_000003\n"


HARMS = {
    "missing": lambda file, data: file.unlink(),
    "cut": lambda file, data: file.write_bytes(data[:-1]),
    "empty": lambda file, data: file.write_bytes(b""),
    "flipped": lambda file, data: file.write_bytes(data[: len(data) // 2] + b"~" + data[len(data) // 2 + 1 :]),
    "a directory": lambda file, data: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", ["weights/part.bin", STATE, FILES])
def test_a_harmed_one_is_named_and_the_one_before_is_taken(tmp_path, name, harm):
    checkpoints = CheckpointStore(tmp_path, CheckpointConfig(keep_best="reward"))
    save(checkpoints, 1, reward=1.0)
    file = save(checkpoints, 2, reward=2.0).path / name
    HARMS[harm](file, file.read_bytes())
    found, problems = checkpoints.newest_whole(digests_of)
    assert found.step == 1
    (problem,) = problems
    assert problem.startswith(str(file))
    save(checkpoints, 3, reward=0.5)
    assert checkpoints.newest_whole(digests_of)[0].step == 3


def test_every_flipped_bit_of_the_list_of_files_is_noticed_or_changes_nothing(tmp_path):
    checkpoints = CheckpointStore(tmp_path, CheckpointConfig())
    saved = save(checkpoints, 1)
    file = saved.path / FILES
    data = file.read_bytes()
    said = json.loads(data)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        problems = checkpoints.problems(saved, digests_of)
        assert all(problem.startswith(str(file)) for problem in problems)
        # White space may become other white space.
        assert problems or json.loads(changed) == said | {FILES: said[FILES] | json.loads(changed)[FILES]}


def test_a_list_that_leads_out_of_the_checkpoint_is_refused(tmp_path):
    checkpoints = CheckpointStore(tmp_path, CheckpointConfig())
    partial = checkpoints.begin(1, 0)
    checkpoints.seal(1, {})
    (tmp_path / "other").write_text("of somebody else")
    saved = checkpoints.complete(1, digests_of(partial, [STATE, "../other"]))
    (problem,) = checkpoints.problems(saved, digests_of)
    assert "it names ../other, which is outside" in problem


def test_what_may_not_be_read_is_named(passable):
    checkpoints = CheckpointStore(passable, CheckpointConfig())
    save(checkpoints, 1)
    newest = save(checkpoints, 2).path
    for closed in (newest / "weights" / "part.bin", newest / "weights", newest):
        mode = closed.stat().st_mode
        closed.chmod(0)
        try:
            with as_nobody():
                found, problems = checkpoints.newest_whole(digests_of)
        finally:
            closed.chmod(mode)
        assert found.step == 1 and len(problems) == 1 and problems[0].startswith(str(newest)), closed


@pytest.fixture
def passable():
    """A directory that everybody may pass; those of pytest are its user's alone, and so are all with some umasks."""
    umask = os.umask(0o022)
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)
    os.umask(umask)


@contextlib.contextmanager
def as_nobody():
    """Root may read everything, and is somebody else here."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_without_room_nothing_is_begun_and_the_older_ones_stay(tmp_path):
    checkpoints = CheckpointStore(tmp_path, CheckpointConfig())
    save(checkpoints, 1)
    with pytest.raises(OSError, match=r"a checkpoint takes about .* only .* are free; make room"):
        checkpoints.begin(2, expected_bytes=1 << 60)
    assert steps(checkpoints) == [1] and not list(tmp_path.glob("*.partial"))
