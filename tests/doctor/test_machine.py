"""One machine's limits, disk and devices."""

import os
from pathlib import Path

import pytest

from needs import small_disk
from spmd_rl.doctor.finding import Finding
from spmd_rl.doctor.local import Here, local_findings, read_config
from spmd_rl.doctor.machine import (
    devices,
    in_bytes,
    npu_driver,
    open_files,
    run_directory,
    shared_memory,
    vector_units,
)


@pytest.mark.parametrize(("limit", "verdict"), [(1024, "stop"), (4096, "warn"), (65536, "ok"), (-1, "ok")])
def test_open_files_are_compared_with_what_so_many_ranks_need(limit, verdict):
    found = open_files(512, limit)
    assert found.verdict == verdict
    assert (verdict == "ok") == ("ulimit -n" not in found.fix)


def test_a_run_directory_that_is_not_there_yet_is_tried_and_left_as_it_was(tmp_path):
    found = run_directory(tmp_path / "runs" / "new")
    assert {row.check: row.verdict for row in found} == {"disk space": "ok", "disk speed": "ok"}
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_the_run_directory_should_be_stops_a_run(tmp_path):
    (tmp_path / "runs").touch()
    [found] = run_directory(tmp_path / "runs" / "new")
    assert found.verdict == "stop" and "is not a directory" in found.found and "--run.dir" in found.fix


@pytest.fixture
def full_disk(tmp_path):
    with small_disk(tmp_path, "size=1m") as disk:
        (disk / "filler").write_bytes(b"x" * (1 << 20))
        yield disk


@pytest.fixture
def read_only_disk(tmp_path):
    with small_disk(tmp_path, "size=1m,ro") as disk:
        yield disk


def test_a_full_disk_stops_a_run(full_disk):
    [found] = run_directory(full_disk / "run")
    assert (found.check, found.verdict) == ("disk space", "stop")
    assert "full" in found.found and str(full_disk) in found.found and "--run.dir" in found.fix


def test_a_directory_that_cannot_be_written_stops_a_run(read_only_disk):
    [found] = run_directory(read_only_disk / "run")
    assert (found.check, found.verdict) == ("run directory", "stop") and "Read-only" in found.found


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_of_somebody_else_stops_a_run():
    assert run_directory(Path("/proc/1/run"))[0].verdict == "stop"


def test_a_disk_without_room_for_a_checkpoint_is_pointed_at(tmp_path):
    [found] = run_directory(tmp_path, weights_bytes=1 << 50, measure=False)
    assert found.verdict == "warn" and "one checkpoint takes up to 7,168.0 TiB" in found.found


def test_little_or_no_shared_memory_is_pointed_at(tmp_path):
    assert shared_memory(str(tmp_path), least_bytes=1 << 60).verdict == "warn"
    assert shared_memory(str(tmp_path / "none")).verdict == "warn"
    assert shared_memory(str(tmp_path), least_bytes=1).verdict == "ok"


def test_every_rank_needs_a_device():
    assert devices("npu", 16, 16).verdict == "ok"
    few = devices("npu", 8, 16)
    assert few.verdict == "stop" and "ASCEND_RT_VISIBLE_DEVICES" in few.fix
    assert devices("cuda", 0, 1).verdict == "stop"
    assert devices("cpu", 0, 4, cores=2).verdict == "warn" and devices("cpu", 0, 2, cores=2).verdict == "ok"


def test_sizes_are_said_in_words():
    assert [in_bytes(x) for x in (5, 1536, 3 << 30)] == ["5 B", "1.5 KiB", "3.0 GiB"]


def test_a_cpu_without_avx_512_is_said_with_what_to_take():
    [finding] = vector_units("fpu sse2 avx avx2 fma")
    assert finding.found == "no AVX-512 (avx2, avx)" and "float32" in finding.fix
    assert vector_units("avx avx2 avx512f avx512_bf16") == vector_units("") == []


def test_a_critic_counts_for_the_room_that_a_checkpoint_takes_and_must_be_there(tmp_path):
    for name, size in (("policy", 3 << 20), ("critic", 2 << 20)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(bytes(size))
    words = ["--model.path", str(tmp_path / "policy"), "--run.dir", str(tmp_path / "run"), "--run.platform", "cpu"]

    def found(*more: str) -> dict[str, Finding]:
        config = read_config([*words, *more])
        return {row.check: row for row in local_findings(Here("cpu", 1, 1, 1, config), measure_disk=False)}

    ppo = ("--algorithm.advantage", "gae")
    critic = ("--critic.path", str(tmp_path / "critic"))
    for more, mib in (((), 21), (ppo, 42), ((*ppo, *critic), 35)):
        assert f"checkpoints of up to {mib}.0 MiB" in found(*more)["disk space"].found
    assert "critic" not in found(*ppo)
    assert found(*ppo, *critic)["critic"].found == f"{tmp_path / 'critic'}: 2.0 MiB of weights"
    lost = found(*ppo, "--critic.path", "nowhere")["critic"]
    assert (lost.verdict, lost.found) == ("stop", "critic.path = nowhere: no config.json there")


@pytest.mark.parametrize(
    "text, verdict, said",
    [
        ("Version=25.3.rc1\nascendhal_version=7.35.23\npackage_version=25.3.rc1\n", "ok", "Ascend HDK 25.3.rc1"),
        ("Version=26.0.rc1.b10\n", "ok", "26.0.rc1.b10"),
        ("package_version=25.0.rc1.1\n", "warn", "25.0.rc1.1; CANN 9.1 needs 25.2 or newer"),
        ("Version=24.1.rc3.b999\n", "warn", "24.1.rc3.b999"),
        ("nothing\n", "skip", "names no version"),
    ],
)
def test_the_driver_of_npus_is_new_enough_for_cann(tmp_path, text, verdict, said):
    file = tmp_path / "version.info"
    file.write_text(text)
    found = npu_driver(file)
    assert found.verdict == verdict and said in found.found


def test_a_container_without_the_drivers_version_is_told_to_mount_it(tmp_path):
    found = npu_driver(tmp_path / "version.info")
    assert found.verdict == "warn" and "-v" in found.fix
