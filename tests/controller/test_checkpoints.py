"""Laws of a run's checkpoints on disk; what the ranks write is stood for by small files."""

import json
import os
import shutil

import pytest

from spmd_rl.config.config import CheckpointConfig
from spmd_rl.controller.checkpoints import FILES, LATEST, STATE, Checkpoints, digests_here


def save(checkpoints, step, **metrics):
    partial = checkpoints.begin(step, expected_bytes=100)
    (partial / "weights").mkdir()
    (partial / "weights" / "part.bin").write_bytes(os.urandom(1000))
    return checkpoints.complete(step, digests_here(partial, checkpoints.seal(step, {"metrics": metrics})))


def steps(checkpoints):
    return [saved.step for saved in checkpoints.found()]


def test_the_newest_is_found_with_its_state(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig(keep_last=3))
    assert checkpoints.newest_whole(digests_here) == (None, [])
    for step in (1, 2, 10):
        save(checkpoints, step, reward=step / 2)
    found, problems = checkpoints.newest_whole(digests_here)
    assert found.step == 10 and problems == [] and found.state() == {"step": 10, "metrics": {"reward": 5.0}}
    assert (tmp_path / "checkpoints" / LATEST).read_text() == "step_000010\n"


def test_an_unfinished_one_is_never_found_and_goes_with_the_next(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    save(checkpoints, 1)
    partial = checkpoints.begin(2, 100)
    (partial / "part.bin").write_bytes(b"half")
    assert steps(checkpoints) == [1]
    save(checkpoints, 3)
    assert steps(checkpoints) == [1, 3] and not partial.exists()


@pytest.mark.parametrize("kept", range(7))
def test_a_kill_at_any_moment_of_completing_leaves_a_whole_one(tmp_path, monkeypatch, kept):
    """The file system's calls succeed `kept` times, then the process is gone."""
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=1))
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
        try:
            save(checkpoints, 2)
        except KeyboardInterrupt:
            pass
    again = Checkpoints(tmp_path, CheckpointConfig(keep_last=1))
    found, problems = again.newest_whole(digests_here)
    assert found is not None and problems == [] and found.step in (1, 2)
    save(again, 3)
    assert steps(again) == [3] and not list(tmp_path.glob("*.partial"))


def test_what_is_kept_is_the_last_ones_every_nth_and_the_best(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_last=2, keep_every=4, keep_best="eval/sums/accuracy"))
    for step in range(1, 11):
        save(checkpoints, step, **{"eval/sums/accuracy": 1.0 if step in (3, 7) else 0.5})
    assert steps(checkpoints) == [3, 4, 8, 9, 10]
    smallest = Checkpoints(tmp_path / "loss", CheckpointConfig(keep_last=1, keep_best="-loss"))
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        save(smallest, step, loss=loss)
    assert steps(smallest) == [2, 3]


@pytest.mark.parametrize("harm", ["missing", "cut", "flipped", "state", "index"])
def test_a_harmed_one_is_named_and_the_one_before_is_taken(tmp_path, harm):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    save(checkpoints, 1)
    newest = save(checkpoints, 2).path
    file = newest / "weights" / "part.bin"
    data = bytearray(file.read_bytes())
    if harm == "missing":
        file.unlink()
    elif harm == "cut":
        file.write_bytes(data[:-1])
    elif harm == "flipped":
        data[500] ^= 1
        file.write_bytes(data)
    elif harm == "state":
        file = newest / STATE
        file.write_text(json.dumps({"step": 3}))
    else:
        file = newest / FILES
        file.write_text("{")
    found, problems = checkpoints.newest_whole(digests_here)
    assert found.step == 1
    (problem,) = problems
    assert problem.startswith(str(file))


def test_without_room_nothing_is_begun_and_the_older_ones_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, CheckpointConfig())
    save(checkpoints, 1)
    with pytest.raises(OSError, match=r"a checkpoint takes about .* only .* are free; make room"):
        checkpoints.begin(2, expected_bytes=1 << 60)
    assert steps(checkpoints) == [1] and not list(tmp_path.glob("*.partial"))
