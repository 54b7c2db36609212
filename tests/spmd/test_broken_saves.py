"""Saving where there is no room, and loading what an enemy or a bad disk has changed, by Megatron's own readers."""

import os
import pickle

import pytest

from needs import small_disk
from spmd.hostile import Trap
from spmd.ranks import run_ranks

MIB = 1 << 20
ALL_LOADED = [[], []]  # on neither rank does a learner begin anew
TRAPS = {"index": ".metadata", "common": "common.pt", "object": "more.distcp"}
HARMED = [
    ("training/.metadata", "missing"),
    ("training/.metadata", "cut"),
    ("training/.metadata", "empty"),
    ("training/common.pt", "missing"),
    ("training/common.pt", "cut"),
    ("training/metadata.json", "flipped"),
    ("training/__0_0.distcp", "missing"),
    ("training/__1_0.distcp", "cut"),
    ("random_00000.json", "cut"),
]
UNSOUND = [("weight", 1, "nan"), ("exp_avg_sq", 0, "inf")]


def test_a_trap_would_be_sprung_by_an_unpickler_without_limits(tmp_path):
    pickle.loads(pickle.dumps(Trap(tmp_path / "sprung")))
    assert (tmp_path / "sprung").exists()


@pytest.fixture(scope="module")
def outcomes(tiny_models, tmp_path_factory):
    """All of it in one start of two ranks: name -> what both ranks said."""
    root = tmp_path_factory.mktemp("broken")
    steps, names = [], []

    def do(name, *step):
        steps.append([str(part) if isinstance(part, os.PathLike) else part for part in step])
        names.extend([name] if step[0] in ("save", "load", "children", "gather") else [])

    def saved(name, change):
        do(f"{name}: save", "save", root / name)
        do("", *change)
        do(name, "load", root / name)
        do("", "clear", root / name)

    with small_disk(root / "disk", f"size={40 * MIB}") as disk:
        do("gather", "gather", root)
        do("whole: save", "save", root / "whole")
        do("whole", "load", root / "whole")
        for kind in (*TRAPS, "outside"):
            saved(kind, ("trap", root / kind, kind, root / "sprung"))
        for file, harm in HARMED:
            saved(f"{file} {harm}".replace("/", " "), ("harm", root / f"{file} {harm}".replace("/", " "), harm, file))
        do("", "fill", disk, 3 * MIB)
        do("no room for tensors", "save", disk / "a")
        do("", "clear", disk)
        do("room again", "save", disk / "b")
        do("", "clear", disk)
        do("", "fill", disk)
        do("no room for common.pt", "save", disk / "c")
        do("", "clear", disk)
        do("", "fill", disk, 0)
        do("no room for the ranks' files", "save", disk / "d")
        do("", "clear", disk)
        for file in (".metadata.tmp", "metadata.json"):
            do(file, "save", disk / file, file)
            do("", "clear", disk)
        do("after all", "save", disk / "e")
        do("after all: load", "load", disk / "e")
        do("", "clear", disk)
        for part, rank, value in UNSOUND:
            do("", "unsound", disk, part, rank, value)
            do(f"{part} {value}", "save", root / f"{part} {value}")
            do("", "sound", disk)
        do("sound again", "save", disk / "f")
        do("children", "children", disk)
        reports = run_ranks("spmd.checkpoint_ranks", 2, {"model": tiny_models["qwen3"], "steps": steps}, 300)
        said = {name: [report["said"][at] for report in reports] for at, name in enumerate(names)}
    return said, root


def test_ranks_tell_each_other_things_of_unequal_length(outcomes):
    said, _ = outcomes
    everyone = [[0, "", None, [0], {"a": [1.5, 2**40]}], [1, "é" * 999, None, [0], {"a": [1.5, 2**40]}]]
    assert said["gather"] == [everyone, everyone]


def test_a_pickle_that_runs_something_is_refused_by_file_and_name_and_is_not_run(outcomes):
    said, root = outcomes
    assert said["whole: save"] == [None, None]
    assert said["whole"] == ALL_LOADED
    for kind, file in TRAPS.items():
        for text in said[kind]:
            assert str(root / kind / "training" / file) in text and "it names " in text and "open" in text, text
    for text in said["outside"]:
        assert "'../../stolen.pt', outside of the directory" in text
    assert not (root / "sprung").exists()


@pytest.mark.parametrize(("file", "harm"), HARMED)
def test_a_harmed_file_is_refused_by_its_name(outcomes, file, harm):
    said, root = outcomes
    name = f"{file} {harm}".replace("/", " ")
    assert said[f"{name}: save"] == [None, None]
    refused = [text for text in said[name] if text]
    # Each rank has a file of its own with the states of its random generators.
    assert len(refused) == (1 if file.startswith("random") else 2)
    for text in refused:
        assert file.rpartition("/")[2] in text and str(root / name) in text, text


def test_a_full_disk_is_told_by_all_ranks_alike_whatever_was_being_written(outcomes):
    said, _ = outcomes
    for name, words in {
        "no room for tensors": "bytes are free there now",
        "no room for common.pt": "bytes are free there now",
        "no room for the ranks' files": "No space left on device",
        ".metadata.tmp": "Is a directory",
        "metadata.json": "Is a directory",
    }.items():
        one, other = said[name]
        assert one == other and words in one, (name, one, other)


@pytest.mark.parametrize(("part", "rank", "value"), UNSOUND)
def test_what_is_not_finite_is_not_saved_and_its_rank_and_name_are_told(outcomes, part, rank, value):
    said, root = outcomes
    name = f"{part} {value}"
    own, other = said[name][rank], said[name][1 - rank]
    words = f"rank {rank}: "
    assert own.startswith(f"raised: {words}") and "holds values that are not finite, so nothing is saved" in own
    assert part == "weight" or part in own
    assert words in other and "holds values that are not finite" in other
    assert not list((root / name / "training").glob(f"__{rank}_*"))


def test_the_next_save_works_and_no_process_stays(outcomes):
    said, _ = outcomes
    for name in ("room again", "after all", "sound again"):
        assert said[name] == [None, None], name
    assert said["after all: load"] == ALL_LOADED
    assert said["children"] == [[], []]
