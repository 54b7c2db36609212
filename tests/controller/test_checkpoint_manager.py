"""A save that fails: what is said, what stays, and that the next one works; on a disk that is really full."""

import contextlib
import errno
import os
from pathlib import Path

import pytest

from needs import small_disk
from spmd_rl.config.config import CheckpointConfig, Config, ModelConfig, RunConfig, TrainConfig
from spmd_rl.controller.checkpoint_manager import CheckpointManager, Preempted
from spmd_rl.controller.ranks import Ranks
from spmd_rl.data.answers import ANSWERS, Progress
from spmd_rl.data.digests import digests_of
from spmd_rl.runlog import checkpoint_store as checkpoints
from spmd_rl.runlog.run_log import RunLog
from spmd_rl.testing.simulated_ranks import SimulatedRanks

KIB, MIB = 1 << 10, 1 << 20


class OneRank:
    """Stands for the ranks, and writes so many bytes as a rank's part."""

    def __init__(self, size=MIB):
        self.size, self.expected, self.failed, self.asked = size, size, None, False
        self.idle, self.written, self.hashed = True, True, True

    def checkpoint_bytes(self):
        return self.expected

    def begin_checkpoint(self, directory):
        self.failed = None
        try:
            (Path(directory) / "part.bin").write_bytes(os.urandom(self.size))
        except OSError as error:
            self.failed = str(error)

    def checkpoint_progress(self, wait):
        assert self.idle, "the ranks are gone"
        self.written |= wait
        return self.written, self.failed, self.asked

    def checkpoint_digests(self, directory, names, wait):
        assert self.idle, "the ranks are gone"
        if not (self.hashed or wait):
            return None
        return digests_of(Path(directory), names)


@pytest.fixture
def disk(tmp_path):
    """A file system of 8 MiB."""
    with small_disk(tmp_path / "disk", "size=8m") as place:
        yield place


@pytest.fixture
def kept(disk, tmp_path, monkeypatch):
    """on_failure -> a manager whose run directory is elsewhere and its checkpoints on the small disk, and its ranks."""
    monkeypatch.setattr(checkpoints, "_SPARE_BYTES", 0)
    logs = contextlib.ExitStack()

    def make(on_failure="continue", keep_best=None):
        run_dir = tmp_path / "run"
        run_dir.mkdir(exist_ok=True)
        if not (run_dir / "checkpoints").exists():
            (run_dir / "checkpoints").symlink_to(disk)
        config = Config(
            ModelConfig("m"),
            run=RunConfig(wandb="off", tensorboard=False),
            train=TrainConfig(steps=100),
            checkpoint=CheckpointConfig(every_steps=1, keep_last=9, on_failure=on_failure, keep_best=keep_best),
        )
        ranks = OneRank()
        log = logs.enter_context(contextlib.closing(RunLog(config, run_dir, 1)))
        return CheckpointManager(config, ranks, log), ranks, run_dir / "run.log"

    with logs:
        yield make


def fill(disk, left):
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "ballast").write_bytes(bytes(free - left))


def steps(disk):
    return sorted(path.name for path in disk.iterdir() if path.name.startswith("step_"))


@pytest.mark.parametrize(
    ("left", "loop", "words"),
    [
        (512 * KIB, {}, "a checkpoint takes about 0.00 GiB, and only 0.00 GiB are free"),
        (512 * KIB, {}, "No space left on device"),
        (MIB, {"long": "x" * 20 * KIB}, "state.json: No space left on device"),
        (MIB, {}, "files.json: No space left on device"),
    ],
    ids=["before", "part", "state", "files"],
)
def test_a_full_disk_costs_one_checkpoint_and_nothing_else(disk, kept, left, loop, words):
    manager, ranks, log = kept()
    manager.maybe_save(1, {})
    manager.close()
    whole = {path.name: path.read_bytes() for path in (disk / "step_000001").iterdir()}
    pages = -(-len(whole["state.json"]) // 4096) * 4 * KIB
    fill(disk, left + pages if "json" in words else left)
    ranks.expected = ranks.size if "takes about" in words else 0
    free = os.statvfs(disk).f_bavail
    manager.maybe_save(2, loop)
    manager.close()
    (said,) = [line for line in log.read_text().splitlines() if line.startswith("step 2 ")]
    assert said.startswith("step 2 could not be saved: ") and words in said
    assert said.endswith("; older checkpoints are as they were") or "make room" in said
    assert steps(disk) == ["step_000001"] and os.statvfs(disk).f_bavail == free, "what was written is gone again"
    assert {path.name: path.read_bytes() for path in (disk / "step_000001").iterdir()} == whole
    (disk / "ballast").unlink()
    manager.maybe_save(3, {})
    manager.close()
    assert steps(disk) == ["step_000001", "step_000003"] and (disk / "latest").read_text() == "step_000003\n"


def test_who_is_asked_to_end_says_saved_only_of_what_is(disk, kept):
    manager, ranks, log = kept()
    manager.maybe_save(1, {})
    manager.close()
    fill(disk, 256 * KIB)
    ranks.expected, ranks.asked = 0, True
    with pytest.raises(RuntimeError, match=r"asked to end by SIGUSR1, and step 2 could not be saved"):
        manager.maybe_save(2, {})
    (disk / "ballast").unlink()
    with pytest.raises(Preempted, match="step 3 is saved"):
        manager.maybe_save(3, {})
    assert steps(disk) == ["step_000001", "step_000003"]


def test_a_best_that_no_step_has_is_said_once_with_the_nearest(disk, kept):
    manager, ranks, log = kept(keep_best="grpo/rewards/means")
    for step in (1, 2):
        with manager.log.step(step):
            manager.log.add("grpo/rewards/mean", 0.5)
        manager.maybe_save(step, {})
    manager.close()
    (said,) = [line for line in log.read_text().splitlines() if "keep_best" in line]
    assert "step 1 has no such value" in said and "did you mean grpo/rewards/mean?" in said


def test_the_run_stops_where_it_is_asked_to(disk, kept):
    manager, ranks, log = kept("stop")
    manager.maybe_save(1, {})
    manager.close()
    fill(disk, 256 * KIB)
    ranks.expected = 0
    manager.maybe_save(2, {})
    with pytest.raises(RuntimeError, match=r"step 2 could not be saved: .*No space left.*on_failure = continue would"):
        manager.close()
    assert steps(disk) == ["step_000001"]


def test_a_rename_that_fails_leaves_the_older_one(disk, kept, monkeypatch):
    manager, ranks, log = kept()
    manager.maybe_save(1, {})
    manager.close()

    def full(self, target):
        raise OSError(errno.ENOSPC, "No space left on device", str(target))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        manager.maybe_save(2, {})
        manager.close()
    assert "step 2 could not be saved: [Errno 28] No space left" in log.read_text()
    assert steps(disk) == ["step_000001"]
    manager.maybe_save(3, {})
    manager.close()
    assert steps(disk) == ["step_000001", "step_000003"]


@pytest.mark.parametrize(
    ("written", "idle", "left"),
    [
        (False, True, "step_000001"),  # the ranks still answer, and are waited for
        (False, False, "step_000001.partial"),
        (True, True, "step_000001"),
        (True, False, "step_000001"),  # all had written: rank 0 reads the files alone
    ],
)
def test_a_run_that_fails_completes_what_is_written_and_nothing_else(disk, kept, written, idle, left):
    manager, ranks, log = kept()
    manager.maybe_save(1, {"prompts_taken": 8})
    ranks.written, ranks.hashed = written, False
    manager.advance()
    ranks.idle = idle
    manager.complete_while_failing()
    assert steps(disk) == [left]
    if left == "step_000001":
        store = checkpoints.CheckpointStore(disk, CheckpointConfig())
        saved, problems = store.newest_whole(digests_of)
        assert problems == [] and saved.state()["loop"] == {"prompts_taken": 8}
        assert "step 1 is saved" in log.read_text()


@pytest.mark.parametrize("broken", ["gone", "rename"])
def test_a_run_that_fails_raises_nothing_else_and_leaves_what_it_cannot_complete(disk, kept, monkeypatch, broken):
    manager, ranks, log = kept()
    ranks.hashed = False
    manager.maybe_save(1, {})
    manager.advance()
    ranks.idle = False
    if broken == "gone":
        (disk / "step_000001.partial" / "part.bin").unlink()
    else:
        monkeypatch.setattr(Path, "rename", lambda self, target: (_ for _ in ()).throw(OSError("no more room")))
    manager.complete_while_failing()
    assert steps(disk) == ["step_000001.partial"]
    manager.complete_while_failing()


def test_a_run_that_fails_with_nothing_begun_asks_the_ranks_nothing(disk, kept):
    manager, ranks, log = kept()
    ranks.idle = False
    manager.complete_while_failing()
    assert steps(disk) == []


def test_a_file_that_cannot_be_read_again_costs_its_checkpoint_and_no_rank_loses_its_place(disk, kept):
    manager, _, log = kept()
    told = [[] for _ in range(3)]

    def do(rank, verb, arguments):
        told[rank].append(verb)
        mine = f"part_{rank}"
        match verb:
            case "begin_checkpoint":
                (Path(arguments["directory"]) / mine).write_bytes(bytes(KIB))
            case "checkpoint_bytes":
                return KIB
            case "checkpoint_progress":
                return Progress(True, None, False)
            case "checkpoint_digests":
                directory = Path(arguments["directory"])
                if rank == 1 and directory.name.startswith("step_000001"):
                    (directory / mine).unlink()
                return digests_of(directory, arguments["names"][rank::3])

    class OwnWorker:
        def do(self, verb, arguments):
            return do(0, verb, arguments)

    manager.ranks = Ranks(SimulatedRanks(3, do, protocol=ANSWERS), OwnWorker())
    manager.maybe_save(1, {})
    manager.close()
    assert "step_000001.partial/part_1: can't be read (No such file or directory); older" in log.read_text()
    assert steps(disk) == [] and manager.ranks.idle, "the ranks wait for the next verb"
    manager.maybe_save(2, {})
    manager.close()
    assert steps(disk) == ["step_000002"]
    assert told[0] == told[1] == told[2] and told[0].count("begin_checkpoint") == 2, "the same, in the same order"


def test_a_file_that_no_node_has_any_more_costs_its_checkpoint(disk, kept):
    manager, ranks, log = kept()
    ranks.checkpoint_digests = lambda directory, names, wait: digests_of(Path(directory), names[1:])
    manager.maybe_save(1, {})
    manager.close()
    assert "could not be saved" in log.read_text() and "no node has it any more" in log.read_text()
    assert steps(disk) == []


def test_what_could_not_be_tidied_up_is_said(disk, kept, monkeypatch):
    manager, ranks, log = kept()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints.CheckpointStore, "_point_to", full)
    manager.maybe_save(1, {})
    manager.close()
    assert "step_000001 is complete, but" in log.read_text() and "step 1 is saved" in log.read_text()
