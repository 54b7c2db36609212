"""Which checkpoint a run goes on from, and what is said of those that it can't; without starting ranks."""

import dataclasses
import json
import pickle

import pytest
from torch.distributed import HashStore

from spmd.hostile import Trap
from spmd_rl.config.config import CheckpointConfig, Config, ModelConfig
from spmd_rl.config.loading import settings
from spmd_rl.data.digests import digests_of
from spmd_rl.distributed.world import World
from spmd_rl.runlog.checkpoint_store import FILES, STATE, CheckpointStore
from spmd_rl.runtime.resume_point import resume_point


def alone(begun=False):
    """The only rank; `begun`: in an attempt after one that had begun to write."""
    world = World(0, 1, 0, 1, None, None, HashStore())
    if begun:
        world.begin()
    return world


CONFIG = Config(ModelConfig("some/model"))


@pytest.fixture
def run_dir(tmp_path):
    """A run with checkpoints of the steps 1, 2 and 3."""
    kept = CheckpointStore(tmp_path / "checkpoints", CheckpointConfig(keep_last=9))
    for step in (1, 2, 3):
        write(kept, step)
    return tmp_path


def write(kept, number, **state):
    partial = kept.begin(number, 0)
    (partial / "training").mkdir()
    (partial / "training" / "part.bin").write_bytes(b"weights" * 99)
    whole = {"loop": {}, "settings": settings(CONFIG)} | state
    return kept.complete(number, digests_of(partial, kept.seal(number, whole))).path


def told(resume="auto", load="all", **changes):
    chosen = dataclasses.replace(CONFIG.checkpoint, resume=str(resume), load=load)
    return dataclasses.replace(CONFIG, checkpoint=chosen, **changes)


def resumed(run_dir, resume="auto", begun=False, **changes):
    return resume_point(told(resume, **changes), run_dir, alone(begun))


def test_auto_takes_the_newest_whole_one_and_says_what_it_passed_over(run_dir):
    found = resumed(run_dir)[0]
    assert found.saved.step == 3 and found.same_run and not found.only_weights and resumed(run_dir)[1] == []
    file = run_dir / "checkpoints" / "step_000003" / "training" / "part.bin"
    file.write_bytes(file.read_bytes()[:-3])
    (run_dir / "checkpoints" / "step_000002" / FILES).unlink()
    found, notes = resumed(run_dir)
    assert found.saved.step == 1
    assert [note.partition(": ")[0] for note in notes] == ["checkpoint.resume = auto"] * 2
    assert f"passed over, {file}: 690 bytes, 693 were written" in notes[0]
    assert str(run_dir / "checkpoints" / "step_000002" / FILES) in notes[1]
    assert resumed(run_dir, "never") == (None, [])


def test_a_named_one_that_is_harmed_is_refused_and_the_next_older_one_offered(run_dir):
    named = run_dir / "checkpoints" / "step_000002"
    (named / STATE).write_text("{")
    with pytest.raises(ValueError) as refused:
        resumed(run_dir, named)
    assert f"checkpoint.resume = {named}: {named / STATE}: 1 bytes, " in str(refused.value)
    assert str(refused.value).endswith(f"; {run_dir / 'checkpoints' / 'step_000001'} is whole")


@pytest.mark.parametrize("content", [{}, {"config.json": "{}"}, {"metadata.json": "{}", ".metadata": "x"}])
def test_an_empty_directory_or_another_format_is_no_checkpoint_of_a_run(run_dir, content):
    other = run_dir / "other"
    other.mkdir()
    for name, text in content.items():
        (other / name).write_text(text)
    with pytest.raises(ValueError, match=rf"checkpoint\.resume = .*other/{FILES}: can't be read .*; name a directory"):
        resumed(run_dir, other)
    with pytest.raises(ValueError, match="nowhere"):
        resumed(run_dir, run_dir / "nowhere")


def test_another_models_checkpoint_is_refused_by_the_setting(run_dir):
    with pytest.raises(ValueError, match=r"model\.path = another/model: the run to go on with had some/model"):
        resumed(run_dir, run_dir / "checkpoints" / "step_000003", model=ModelConfig("another/model"))


@pytest.mark.parametrize(
    ("state", "words"),
    [({"loop": None}, "loop is None"), ({"settings": []}, "settings is []"), ({"step": "six"}, "step is 'six'")],
)
def test_a_state_that_no_run_has_written_is_named(run_dir, state, words):
    path = write(CheckpointStore(run_dir / "others", CheckpointConfig()), 7, **state)
    with pytest.raises(ValueError) as refused:
        resumed(run_dir, path)
    assert str(refused.value).startswith(f"{path / STATE}: {words}")


def test_consistent_digests_make_no_pickle_harmless_and_none_is_opened_to_find_out(run_dir, tmp_path):
    """What is in the files is looked at when they are loaded: tests/spmd/test_broken_saves.py."""
    kept = CheckpointStore(tmp_path / "traps", CheckpointConfig())
    partial = kept.begin(1, 0)
    (partial / "training").mkdir()
    (partial / "training" / ".metadata").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    names = kept.seal(1, {"loop": {}, "settings": settings(CONFIG)})
    path = kept.complete(1, digests_of(partial, names)).path
    assert json.loads((path / FILES).read_text())["training/.metadata"]
    assert resumed(run_dir, path)[0].saved.path == path
    assert not (tmp_path / "sprung").exists()


def other_run(tmp_path, **state):
    """A checkpoint of step 5 of another run."""
    return write(CheckpointStore(tmp_path / "other" / "checkpoints", CheckpointConfig()), 5, **state)


def test_one_of_this_run_is_known_however_its_path_is_spelled(run_dir, monkeypatch):
    monkeypatch.chdir(run_dir)
    (run_dir / "link").symlink_to(run_dir / "checkpoints")
    for path in ("checkpoints/step_000002", run_dir / "checkpoints" / "step_000002", "link/step_000002"):
        found, _ = resumed(run_dir, path)
        assert found.saved.step == 2 and found.same_run, path
    found, _ = resumed(run_dir, other_run(run_dir / "elsewhere"))
    assert found.saved.step == 5 and not found.same_run


@pytest.mark.parametrize("load", ["all", "weights"])
def test_the_same_command_goes_on_from_what_it_has_saved_since(run_dir, tmp_path, load):
    path = other_run(tmp_path / "elsewhere")
    found, notes = resumed(run_dir, path, load=load)
    assert found.saved.step == 5 and found.only_weights == (load == "weights") and notes == []
    write(CheckpointStore(run_dir / "checkpoints", CheckpointConfig()), 6, settings=settings(told(path, load)))
    found, notes = resumed(run_dir, path, load=load)
    assert found.saved.step == 6 and found.same_run and not found.only_weights
    assert notes == [f"checkpoint.resume = {path}: so the run began; it goes on from what it has saved since"]
    again, _ = (
        resumed(run_dir, path, load=load, train=dataclasses.replace(CONFIG.train, learning_rate=1.0))
        if (load == "weights")
        else resumed(run_dir, path, load="weights")
    )
    assert again.saved.step == 5 and again.only_weights, "it was told something else"


def test_never_goes_on_only_where_torchrun_has_started_the_ranks_again(run_dir):
    write(CheckpointStore(run_dir / "checkpoints", CheckpointConfig()), 6, settings=settings(told("never")))
    assert resumed(run_dir, "never") == (None, [])
    found, _ = resumed(run_dir, "never", begun=True)
    assert found.saved.step == 6 and found.same_run


def test_never_begins_anew_where_the_ranks_before_had_not_got_to_write(run_dir):
    """What is there is another run's, which was told something else."""
    assert resumed(run_dir, "never", begun=True) == (None, [])


def test_weights_of_the_run_itself_want_a_run_of_their_own(run_dir):
    with pytest.raises(ValueError, match=r"checkpoint.load = weights: .* give the new run a run.name or run.dir"):
        resumed(run_dir, run_dir / "checkpoints" / "step_000003", load="weights")


def test_ranks_that_see_different_files_all_say_so(run_dir, monkeypatch):
    def other_rank_too(said, group):
        return [said, "begins anew" if isinstance(said, str) and said.startswith("takes") else said]

    monkeypatch.setattr("spmd_rl.runtime.resume_point.gather", other_rank_too)
    with pytest.raises(ValueError, match=r"find different checkpoints \(rank 0 takes up .*; rank 1 begins anew\)"):
        resumed(run_dir)


def seal(run_dir, step, **state):
    """A step whose files are all written, of a run that died before it had a name."""
    kept = CheckpointStore(run_dir / "checkpoints", CheckpointConfig(keep_last=9))
    partial = kept.begin(step, 0)
    (partial / "part.bin").write_bytes(b"weights" * 99)
    kept.seal(step, {"loop": {}, "settings": settings(CONFIG)} | state)
    return partial


def test_what_was_all_written_when_the_run_died_is_completed_and_taken_up(run_dir):
    partial = seal(run_dir, 4)
    found, notes = resumed(run_dir)
    assert found.saved.step == 4 and found.same_run and not partial.exists()
    assert len(notes) == 1 and "step_000004: all its files were written when the run ended" in notes[0]
    assert resumed(run_dir) == (found, [])


def test_what_was_not_all_written_is_left_as_it_is(run_dir):
    partial = seal(run_dir, 4)
    (partial / "part.bin").write_bytes(b"weights")
    found, notes = resumed(run_dir)
    assert found.saved.step == 3 and notes == [] and partial.exists()


def test_the_only_one_of_a_run_counts_when_torchrun_starts_the_ranks_again(tmp_path):
    seal(tmp_path, 1)
    assert resumed(tmp_path)[0].saved.step == 1


def test_one_that_cannot_be_completed_is_said_and_the_older_one_is_taken_up(run_dir, monkeypatch):
    seal(run_dir, 4)
    monkeypatch.setattr(CheckpointStore, "_give_name", lambda *_: (_ for _ in ()).throw(OSError("read-only")))
    found, notes = resumed(run_dir)
    assert found.saved.step == 3 and "could not be completed: read-only" in notes[0]


@pytest.mark.parametrize("rules", [{}, {"exact": 1.0}, {"math_answer": 1.0, "format": 0.1}])
def test_a_run_with_rules_of_its_own_goes_on_and_not_with_others(tmp_path, rules):
    own = told(reward=dataclasses.replace(CONFIG.reward, rules=rules))
    write(CheckpointStore(tmp_path / "checkpoints", CheckpointConfig()), 1, settings=settings(own))
    assert resume_point(own, tmp_path, alone())[0].saved.step == 1
    with pytest.raises(ValueError, match="reward.rules"):
        resumed(tmp_path)
