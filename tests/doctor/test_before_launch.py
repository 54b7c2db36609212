"""Test what a launch script is told of its node: an interface and an address on standard output, all else beside it."""

import pytest

from spmd_rl.doctor.before_launch import main

ONE = {"nnodes": 1, "node-rank": 0, "nproc-per-node": 2, "master-addr": "127.0.0.1", "check": 0}
PORTS = {"master-port": 29500, "meet-port": 29499}


def called(**given) -> None:
    options = ONE | PORTS | {name.replace("_", "-"): value for name, value in given.items()}
    main([f"--{name}={value}" for name, value in options.items()])


@pytest.mark.parametrize(
    ("named", "nodes", "way"),
    [("", 1, "lo 127.0.0.1"), ("", 2, "lo 127.0.0.1"), ("lo,eth9", 2, "lo 127.0.0.1")],
    ids=["one node", "the way to node 0", "as it is named"],
)
def test_the_interface_and_the_address_that_lead_to_the_others_are_all_that_is_on_standard_output(
    monkeypatch, capsys, named, nodes, way
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    called(nnodes=nodes)
    assert capsys.readouterr() == (f"{way}\n", "")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nnodes": 2, "node_rank": 2}, "NODE_RANK = 2, NNODES = 2: give each node its own NODE_RANK from 0 to 1"),
        ({"master_port": 80}, "MASTER_PORT = 80: use a number from 1024 to 65535"),
        ({"meet_port": 70000}, "MEET_PORT = 70000: use a number from 1024 to 65535"),
        ({"nnodes": 2, "master_addr": "no-such-host.invalid"}, "no-such-host.invalid"),
    ],
)
def test_what_cannot_work_ends_the_launch_with_the_way_out_on_standard_error(monkeypatch, capsys, given, words):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(SystemExit) as ended:
        called(**given)
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and said.err.startswith("\nlaunch: ") and words in said.err


def test_an_interface_that_is_named_and_not_there_ends_the_launch(monkeypatch, capsys):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    with pytest.raises(SystemExit):
        called(nnodes=2)
    assert "GLOO_SOCKET_IFNAME = eth9: no such interface that is up and has an IPv4 address" in capsys.readouterr().err
