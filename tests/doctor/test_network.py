"""Interfaces, addresses and ports."""

import socket

import pytest

from spmd_rl.doctor import network
from spmd_rl.doctor.network import interface_findings, interface_to, own_address, port_finding


def test_a_port_in_use_is_found_and_a_free_one_is_not():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        port = server.getsockname()[1]
        taken = port_finding("MASTER_PORT", "127.0.0.1", port)
        assert taken.verdict == "stop" and f"MASTER_PORT = {port} on 127.0.0.1: in use" in taken.found
        assert f"ss -ltnp | grep :{port}" in taken.fix
    assert port_finding("MASTER_PORT", "127.0.0.1", port).verdict == "ok"


def test_an_address_of_another_machine_is_no_place_to_listen():
    found = port_finding("MASTER_PORT", "192.0.2.1", 29500)
    assert found.verdict == "stop" and "no address of this machine" in found.found


def test_an_interface_that_is_not_there_stops_a_run_with_the_names_of_those_that_are():
    [found] = interface_findings("cpu", 2, {"GLOO_SOCKET_IFNAME": "nope7"})
    assert found.verdict == "stop" and "nope7" in found.found and "lo (127.0.0.1)" in found.fix
    found = interface_findings("npu", 1, {"HCCL_SOCKET_IFNAME": "=nope7", "GLOO_SOCKET_IFNAME": "lo"})
    assert [row.verdict for row in found] == ["stop", "ok"] and "HCCL_SOCKET_IFNAME = =nope7" in found[0].found


def test_loopback_does_for_one_node_and_not_for_two():
    [one] = interface_findings("cpu", 1, {"GLOO_SOCKET_IFNAME": "lo"})
    [two] = interface_findings("cpu", 2, {"GLOO_SOCKET_IFNAME": "lo"})
    assert (one.verdict, two.verdict) == ("ok", "stop")
    assert "cannot reach" in two.found


def test_a_host_name_that_nobody_knows_leaves_the_own_address_as_gloo_has_it(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert own_address({}) == "127.0.0.1"
    assert own_address({"GLOO_SOCKET_IFNAME": "lo,eth9"}) == "127.0.0.1"
    [found] = interface_findings("cpu", 2, {})
    assert found.verdict == "stop" and "no-such-host.invalid is 127.0.0.1: other nodes cannot reach that" in found.found


def test_the_address_of_a_named_interface_is_taken():
    assert own_address({"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
    assert interface_to("127.0.0.1") == ("lo", "127.0.0.1")


@pytest.mark.parametrize(
    ("named", "fits"),
    [
        ("eth", True),
        ("=eth", False),
        ("=eth0", True),
        ("ib,eth", True),
        ("^eth", False),
        ("^=eth1", True),
        ("ib", False),
    ],
)
def test_interface_variables_are_read_as_nccl_and_hccl_read_them(named, fits):
    assert network._selects(named, "eth0") is fits
