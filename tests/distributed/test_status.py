"""A rank says where it is, and listeners hear every move."""

import pytest

from spmd_rl.distributed import status
from spmd_rl.distributed.status import RankStatus, current_status, doing, on_status_change, set_status


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    monkeypatch.setattr(status, "_status", RankStatus())
    monkeypatch.setattr(status, "_listeners", [])


def test_a_part_of_a_verb_ends_with_its_block_also_when_it_fails():
    set_status(step=3, phase="rollout", verb="generate")
    with pytest.raises(KeyError), doing("request 7"):
        assert (current_status().step, current_status().verb, current_status().doing) == (3, "generate", "request 7")
        raise KeyError
    assert current_status().doing == ""


def test_listeners_hear_every_move_and_may_end_it():
    heard = []
    on_status_change(heard.append)
    set_status(phase="update")
    with doing("microbatch 0"):
        pass
    assert [(place.phase, place.doing) for place in heard] == [
        ("update", ""),
        ("update", "microbatch 0"),
        ("update", ""),
    ]
    assert heard[1].since >= heard[0].since

    def stop(place):
        raise RuntimeError("current_status")

    on_status_change(stop)
    with pytest.raises(RuntimeError, match="current_status"):
        set_status(step=1)
