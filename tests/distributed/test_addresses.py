"""An address in an error of gloo becomes ranks."""

import pytest

from spmd_rl.distributed import addresses

MESSAGE = "[/x/gloo/transport/tcp/pair.cc:537] Read error [10.77.0.2]:31420: Connection reset by peer."


def test_the_ranks_at_the_address_are_named(monkeypatch):
    monkeypatch.setattr(addresses, "_ranks_at", {"10.77.0.1": [0, 1], "10.77.0.2": [2, 3]})
    assert addresses.who(MESSAGE) == "spmd_rl: 10.77.0.2 is the node of ranks 2 to 3: look there first"

    @addresses.naming_peers
    def collective():
        raise RuntimeError(MESSAGE)

    with pytest.raises(RuntimeError) as raised:
        collective()
    assert raised.value.__notes__ == [addresses.who(MESSAGE)]


@pytest.mark.parametrize("known", [{}, {"10.77.0.2": [0, 1]}, {"10.0.0.1": [0], "10.0.0.2": [1]}])
def test_nothing_is_said_where_nothing_is_known(monkeypatch, known):
    monkeypatch.setattr(addresses, "_ranks_at", known)
    assert addresses.who(MESSAGE) == addresses.who("another error") == ""
