"""A fault strikes once, where it was told to, and says so."""

import os
import time

import pytest
import torch

from spmd_rl.config.loading import load_config
from spmd_rl.distributed import status
from spmd_rl.distributed.status import RankStatus, doing, set_status
from spmd_rl.testing.fault_injection import FaultInjector, _flip


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    def again():
        monkeypatch.setattr(status, "_status", RankStatus())
        monkeypatch.setattr(status, "_listeners", [])

    again()
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    return again


def arm(run_dir, *faults, rank=1, more=(), restarts=0):
    return FaultInjector(load_config(["--model.path", "model", *more, "--inject", *faults]), run_dir, rank, restarts)


def test_it_strikes_at_the_first_place_that_fits_and_once(tmp_path, capsys):
    arm(tmp_path, "raise:rank=1,phase=rollout,step=2,error=MemoryError")
    set_status(step=1, phase="rollout")
    set_status(step=2, phase="update")
    with pytest.raises(MemoryError, match="injected by raise:rank=1"):
        set_status(phase="rollout")
    assert "inject: rank 1 raises MemoryError in rollout of step 2, at " in capsys.readouterr().err
    set_status(phase="rollout")


def test_other_ranks_are_spared(tmp_path):
    arm(tmp_path, "raise:rank=1", rank=0)
    set_status(phase="rollout")


def test_text_that_names_no_exception_is_what_the_error_says(tmp_path):
    arm(tmp_path, "raise:phase=update,error=the bus is off")
    with pytest.raises(RuntimeError, match="^the bus is off$"):
        set_status(phase="update")


def test_what_struck_is_on_disk_before_it_strikes_and_does_not_strike_again(tmp_path, apart, capsys):
    faults = ("raise:phase=update", "raise:phase=rollout", "raise:phase=update")
    arm(tmp_path, *faults)
    with pytest.raises(RuntimeError):
        set_status(phase="update")
    [file] = (tmp_path / "faults").iterdir()
    assert file.read_text() == "raise:phase=update\n"
    apart()  # the ranks start again
    arm(tmp_path, *faults)
    assert "raise:phase=update struck rank 1 before" in capsys.readouterr().err
    with pytest.raises(RuntimeError):  # it stands there twice
        set_status(phase="update")
    set_status(phase="update")
    with pytest.raises(RuntimeError):
        set_status(phase="rollout")
    apart()
    arm(tmp_path, *faults)
    set_status(phase="update")
    set_status(phase="rollout")


def test_a_run_that_begins_anew_suffers_anew_and_one_that_torchrun_restarts_does_not(tmp_path, apart):
    never = ("--checkpoint.resume", "never")
    for _ in range(2):
        apart()
        arm(tmp_path, "raise:phase=update", more=never)
        with pytest.raises(RuntimeError):
            set_status(phase="update")
    apart()
    arm(tmp_path, "raise:phase=update", more=never, restarts=1)
    set_status(phase="update")


def test_a_start_is_a_place_too(tmp_path):
    with pytest.raises(RuntimeError):
        arm(tmp_path, "raise:phase=start")


def test_slowness_is_felt_where_it_was_asked_for(tmp_path, monkeypatch):
    arm(tmp_path, "slow:verb=learn,doing=bucket,seconds=0.2")
    set_status(verb="learn")
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    with doing("bucket 3"):
        assert slept == [0.2]
    assert slept == [0.2]


def test_what_is_to_come_later_comes_later(tmp_path):
    arm(tmp_path, "raise:phase=update,after=0.2")
    set_status(phase="update")
    set_status(phase="update")
    time.sleep(0.2)
    with pytest.raises(RuntimeError):
        set_status(phase="update")


def test_a_kill_comes_later_also_while_nothing_moves(tmp_path, monkeypatch):
    killed = []
    monkeypatch.setattr(os, "kill", lambda process, which: killed.append((process, which.name)))
    arm(tmp_path, "kill:phase=update,after=0.05")
    set_status(phase="update")
    deadline = time.monotonic() + 10
    while not killed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert killed == [(os.getpid(), "SIGKILL")]


def test_what_never_came_to_its_place_is_said_at_the_end(tmp_path, capsys):
    arm(tmp_path, "kill:phase=export", "kill:rank=0")
    set_status(verb="stop")
    assert capsys.readouterr().err == "inject: rank 1 never came to where kill:phase=export would strike\n"


@pytest.mark.parametrize("dtype, bits", [(torch.float32, 32), (torch.bfloat16, 16)])
def test_one_bit_of_one_element_flips(dtype, bits):
    integers = {32: torch.int32, 16: torch.int16}[bits]
    for bit in range(bits):
        tensor = torch.full((3, 4), 1.5, dtype=dtype)
        _flip(tensor, (1, 2), bit)
        changed = tensor.view(integers) ^ torch.full((3, 4), 1.5, dtype=dtype).view(integers)
        assert changed[1, 2].item() & ((1 << bits) - 1) == 1 << bit
        assert (changed != 0).sum() == 1
        _flip(tensor, (1, 2), bit)
        assert (tensor == 1.5).all()
