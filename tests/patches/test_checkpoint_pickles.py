"""The readers of pickles in checkpoints: what they may name, and nothing else."""

import argparse
import io
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, MetadataIndex, StorageMeta

from spmd.hostile import Trap
from spmd_rl.patches.checkpoint_pickles import _Unpickler, read_index, read_plain


def write(path, value):
    path.write_bytes(pickle.dumps(value))
    return path


def test_an_index_is_read_with_the_path_it_was_written_to(tmp_path):
    place = _StorageInfo("__0_0.distcp", 0, 8)
    meta = StorageMeta(checkpoint_id=Path("/where/it/was"))
    file = write(tmp_path / ".metadata", Metadata({}, None, {MetadataIndex("a"): place}, meta))
    assert read_index(file).storage_data == {MetadataIndex("a"): place}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pickle.dumps(os.system), r"it names posix\.system"),
        (pickle.dumps(eval), r"it names builtins\.eval"),
        (b"cpathlib\nPath.unlink\n.", r"it names pathlib\.Path\.unlink"),
        (b"ctorch\nload\n.", r"it names torch\.load"),
        (b"\x80\x04\x8c\x05torch\x8c\x0bhub.os.path\x93.", r"it names torch\.hub\.os\.path"),
        (pickle.dumps({"a": 1}), "it holds dict"),
        (b"nonsense", "broken"),
        (b"", "broken"),
    ],
)
def test_an_index_that_names_anything_else_is_refused(tmp_path, content, words):
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(ValueError, match=words) as refused:
        read_index(tmp_path / ".metadata")
    assert str(refused.value).startswith(str(tmp_path / ".metadata"))


@pytest.mark.parametrize("place", ["../other.distcp", "/etc/passwd", "", "deeper/file"])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path, place):
    made = Metadata({}, None, {MetadataIndex("a"): _StorageInfo(place, 0, 8)}, None)
    with pytest.raises(ValueError, match="outside of the directory"):
        read_index(write(tmp_path / ".metadata", made))


def test_archives_hold_plain_values_whatever_libraries_and_the_environment_call_safe(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    file = tmp_path / "common.pt"
    torch.save({"a": torch.arange(3), "b": [1.5, None, "c"]}, file)
    found = read_plain(file, "common.pt")
    assert found["a"].tolist() == [0, 1, 2] and found["b"] == [1.5, None, "c"]
    torch.serialization.add_safe_globals([argparse.Namespace])  # as Megatron-Core does
    before = set(torch.serialization.get_safe_globals())
    for value, name in ((argparse.Namespace(a=1), "argparse.Namespace"), (Trap(tmp_path / "sprung"), "open")):
        torch.save(value, file)
        with pytest.raises(ValueError, match=rf"common\.pt: it names \S*{name}, and only tensors and plain values"):
            read_plain(file, "common.pt")
    assert set(torch.serialization.get_safe_globals()) == before
    assert not (tmp_path / "sprung").exists()
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"common\.pt: broken"):
        read_plain(file, "common.pt")


def written_as_by_python_3_11_2(kind, name):
    """Return the pickle of getattr(kind, name), as those versions write a member of an enumeration."""
    module = kind.__module__
    return f"cbuiltins\ngetattr\n(c{module}\n{kind.__name__}\nV{name}\ntR.".encode()


def test_members_of_enumerations_are_read_as_every_python_writes_them():
    member = _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    for pickled in (pickle.dumps(member), written_as_by_python_3_11_2(_MEM_FORMAT_ENCODING, member.name)):
        assert _Unpickler(io.BytesIO(pickled)).load() is member


@pytest.mark.parametrize(
    ("kind", "name"),
    [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__"), (_MEM_FORMAT_ENCODING, "mro")],
)
def test_nothing_else_is_reached_that_way(kind, name):
    with pytest.raises(pickle.UnpicklingError, match=f"it takes '{name}' of .*, which is no member of an enumeration"):
        _Unpickler(io.BytesIO(written_as_by_python_3_11_2(kind, name))).load()
