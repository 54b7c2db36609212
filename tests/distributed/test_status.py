"""A rank says where it is, and listeners hear every move."""

import pytest

from spmd_rl.distributed import status as whereabouts
from spmd_rl.distributed.status import Place, at, here, listen, move


@pytest.fixture(autouse=True)
def apart(monkeypatch):
    monkeypatch.setattr(whereabouts, "_place", Place())
    monkeypatch.setattr(whereabouts, "_listeners", [])


def test_a_part_of_a_verb_ends_with_its_block_also_when_it_fails():
    move(step=3, phase="rollout", verb="generate")
    with pytest.raises(KeyError), at("request 7"):
        assert (here().step, here().verb, here().doing) == (3, "generate", "request 7")
        raise KeyError
    assert here().doing == ""


def test_listeners_hear_every_move_and_may_end_it():
    heard = []
    listen(heard.append)
    move(phase="update")
    with at("microbatch 0"):
        pass
    assert [(place.phase, place.doing) for place in heard] == [
        ("update", ""),
        ("update", "microbatch 0"),
        ("update", ""),
    ]
    assert heard[1].since >= heard[0].since

    def stop(place):
        raise RuntimeError("here")

    listen(stop)
    with pytest.raises(RuntimeError, match="here"):
        move(step=1)
