"""An Ascend machine as its own tools describe it."""

import subprocess

import pytest

from spmd_rl.doctor import ascend
from spmd_rl.doctor.ascend import Die, base_port, cann, dies_of, libraries, memory, read_dies, variables, wheel
from spmd_rl.doctor.profiles import PROFILES, profile_findings

SMI = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 92.9        48                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3396 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | Warning       | 95.1        50                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          61396/ 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
| 1       0                 | 4242          | python                   | 57000                   |
+===========================+===============+====================================================+
"""
A3 = SMI.replace("| 0     910B3               ", "| 0     Ascend910           ")


def test_npu_smis_table_is_read():
    assert dies_of(SMI) == [Die(0, "910B3", "OK", 3396, 65536), Die(1, "910B3", "Warning", 61396, 65536, (4242,))]
    assert [die.name for die in dies_of(A3)] == ["Ascend910", "910B3"]
    assert dies_of("npu-smi: nothing") == []


def test_a_die_that_is_not_well_or_taken_is_named_with_who_has_it():
    dies = dies_of(SMI)
    assert [row.verdict for row in memory(dies, 1)] == ["ok"]
    ill, taken = memory(dies, 2, alive=lambda process: False)
    assert ill.verdict == "stop" and "die 1 (910B3) is Warning" in ill.found
    assert "61396 of 65536 MB taken: process 4242, which has ended" in taken.found and "reset" in taken.fix
    assert memory(dies, 2, alive=lambda process: True)[1].fix == "end what uses it: kill 4242"


def test_a_wheel_for_other_dies_stops_a_run():
    a2, a3 = [Die(0, "910B3", "OK", 0, 1)], [Die(0, "Ascend910", "OK", 0, 1)]
    assert wheel(a2, "A2").verdict == wheel(a3, "A3").verdict == "ok"
    wrong = wheel(a3, "A2")
    assert wrong.verdict == "stop" and "built for A2, and these dies (Ascend910) are A3" in wrong.found
    assert "v0.23.0-a3" in wrong.fix and wheel(a2, "").verdict == wheel([], "A2").verdict == "skip"


@pytest.mark.parametrize(
    ("error", "verdict", "words"),
    [
        (FileNotFoundError(), "warn", "npu-smi is not here"),
        (subprocess.TimeoutExpired("npu-smi", 60), "stop", "a die hangs"),
        (subprocess.CalledProcessError(1, "npu-smi", "", "DrvMngGetConsoleLogLevel failed"), "stop", "failed: DrvMng"),
    ],
)
def test_npu_smi_without_an_answer_is_a_finding(monkeypatch, error, verdict, words):
    def run(*arguments, **options):
        raise error

    monkeypatch.setattr(ascend.subprocess, "run", run)
    dies, found = read_dies()
    assert dies == [] and found.verdict == verdict and words in found.found


def test_cann_and_its_libraries_are_looked_for(tmp_path, monkeypatch):
    assert cann({})[0].verdict == "stop" and "env.npu.sh" in cann({})[0].fix
    (tmp_path / "version.cfg").write_text("# version: 1.0\nruntime_running_version=[9.1.0:CANN-9.1.0]\n")
    assert cann({"ASCEND_HOME_PATH": str(tmp_path)})[0].found == f"9.1.0 in {tmp_path}"
    (tmp_path / "libatb.so").touch()
    assert [row.check for row in libraries({"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"})] == ["acl"]
    assert [row.check for row in libraries({})] == ["acl", "libatb"]


def test_variables_that_are_in_the_way_are_named():
    assert [row.verdict for row in variables({})] == ["ok"]
    set_wrong = {"VLLM_ASCEND_ENABLE_NZ": "1", "PYTORCH_NPU_ALLOC_CONF": "expandable_segments: True"}
    nz, segments = variables(set_wrong)
    assert nz.verdict == segments.verdict == "stop"
    assert "VLLM_ASCEND_ENABLE_NZ = 1" in nz.found and "PYTORCH_NPU_ALLOC_CONF" in segments.fix


@pytest.mark.parametrize(
    ("kept", "base", "verdict"),
    [("", "60000", "warn"), ("60000-60015", "60000", "ok"), ("60000-60010,9", "60000", "warn"), ("", "61500", "ok")],
)
def test_ports_that_any_connection_may_take_are_pointed_at(tmp_path, kept, base, verdict):
    (tmp_path / "ip_local_port_range").write_text("32768\t60999\n")
    (tmp_path / "ip_local_reserved_ports").write_text(kept + "\n")
    found = base_port({"HCCL_IF_BASE_PORT": base}, tmp_path)
    assert found.verdict == verdict
    assert (f"ip_local_reserved_ports={base}" in found.fix) == (verdict == "warn")


def test_an_unknown_set_of_wheels_is_told_by_the_nearest_profile_and_what_differs():
    target = PROFILES["0.23"]
    assert profile_findings(target.get)[0].verdict == "ok"
    assert profile_findings(lambda name: f"{target[name]}+local")[0].verdict == "ok"
    [old] = profile_findings(PROFILES["0.18"].get)
    assert old.verdict == "warn" and "not a target" in old.found
    [other] = profile_findings(lambda name: "2.10.0" if name == "torch_npu" else target[name])
    assert "nearest is 0.23 (CANN 9.1.0): torch_npu is 2.10.0, not 2.10.0.post4" in other.found
    [bare] = profile_findings(lambda name: None)
    assert "torch_npu is not installed" in bare.found
