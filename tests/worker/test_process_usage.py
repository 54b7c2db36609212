"""Test that what a process holds is counted while it holds it, and no longer."""

import mmap
import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from spmd_rl.worker.process_usage import ProcessUsageMeter, shared_memory


@pytest.fixture
def footprints(tmp_path, monkeypatch):
    """Of this process, with a directory for temporary files in which one is already."""
    (tmp_path / "older").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return ProcessUsageMeter()


def test_descriptors_and_temporary_files_count_while_they_are_there(footprints, tmp_path):
    before = footprints.now()
    assert before.temporary_files == 0 and before.resident_bytes > 1e6
    with tempfile.NamedTemporaryFile(), tempfile.TemporaryDirectory():
        (tmp_path / "older").touch()  # changed, not made
        during = footprints.now()
        assert (during.open_files - before.open_files, during.temporary_files) == (1, 2)
    after = footprints.now()
    assert (after.open_files, after.temporary_files) == (before.open_files, 0)


def test_processes_are_counted_with_those_that_they_started_and_with_their_memory(footprints):
    before = footprints.now()
    program = "import subprocess, sys; print(flush=True); subprocess.run(['sleep', '60'])"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    try:
        child.stdout.readline()
        while (during := footprints.now()).processes < before.processes + 2:
            assert child.poll() is None
        assert during.children_bytes > before.children_bytes + 1e6
    finally:
        os.killpg(child.pid, 9)
        child.wait()
        child.stdout.close()
    assert footprints.now().processes == before.processes


def test_a_file_in_shared_memory_counts_while_it_is_mapped_also_without_its_name(footprints):
    before = footprints.now().shared_memory_files
    path = Path("/dev/shm") / f"spmd_rl_test_{uuid.uuid4().hex}"
    with open(path, "w+b") as file:
        try:
            file.truncate(4096)
            mapped = mmap.mmap(file.fileno(), 4096)
            assert str(path) in shared_memory(os.getpid())
        finally:
            path.unlink()
    assert footprints.now().shared_memory_files == before + 1
    mapped.close()
    assert footprints.now().shared_memory_files == before


def test_a_process_that_is_gone_holds_nothing():
    child = subprocess.Popen(["true"])
    child.wait()
    assert shared_memory(child.pid) == set()
