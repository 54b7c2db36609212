"""Test what nodes find out together, with threads for nodes."""

import threading

import pytest
from torch.distributed import HashStore

from spmd_rl.config.config import Config, ModelConfig, RunConfig
from spmd_rl.doctor.clock_skew import clock_findings, offset
from spmd_rl.doctor.fingerprint import code, compare, digest, settings
from spmd_rl.doctor.links import Link, link_findings, rounds
from spmd_rl.doctor.node_rendezvous import NodeRendezvous, join
from spmd_rl.doctor.reach import connects, listening, peers, reach, reach_findings


def together(nodes: int, act, present=None, seconds: float = 20.0) -> list:
    """Return what act(meeting) returns or raises on each node."""
    store = HashStore()
    told: list = [None] * nodes

    def live(node: int) -> None:
        try:
            told[node] = act(NodeRendezvous(store, node, nodes, seconds))
        except ValueError as error:
            told[node] = error

    threads = [threading.Thread(target=live, args=(node,)) for node in present or range(nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return told


def test_everybody_hears_everybody():
    assert (
        together(3, lambda meeting: meeting.exchange("x", {"from": meeting.node}))
        == [[{"from": 0}, {"from": 1}, {"from": 2}]] * 3
    )


def test_nodes_that_do_not_come_are_named_at_once():
    told = together(4, lambda meeting: meeting.exchange("facts", 1), present=[0, 2], seconds=0.5)
    assert "nodes 1, 3 did not come within 0.5 s" in str(told[0]) and "NODE_RANK" in str(told[0])
    assert "node 0 said nothing more" in str(told[2])


def test_a_node_that_finds_nobody_says_where_it_looked():
    with pytest.raises(ValueError, match="node 1 found nobody at MASTER_ADDR = 127.0.0.1, port 1"):
        join("127.0.0.1", 1, 1, 2, 1.0)


def test_clocks_are_compared_with_the_quickest_exchange():
    # This clock is 5 s ahead; one exchange was held up on its way back.
    ahead, error = offset([(105.0, 100.1, 105.2), (205.0, 200.1, 209.0)])
    assert ahead == pytest.approx(5.0) and error == pytest.approx(0.1)
    told = together(3, lambda meeting: meeting.clock())
    assert told[1:] == [None, None] and len(told[0]) == 2
    assert all(abs(ahead) <= error + 1e-3 for ahead, error in told[0])


def test_a_clock_that_is_off_is_named_and_one_that_may_be_right_is_not():
    [found] = clock_findings([(0.01, 0.001), (-7.5, 0.01)])
    assert (found.verdict, found.where) == ("warn", "node 2") and "7.50 s behind node 0" in found.found
    assert clock_findings([(2.0, 1.5)])[0].verdict == "ok"
    assert clock_findings([]) == []


def test_settings_that_differ_are_named_with_both_values():
    first, second = (settings(Config(ModelConfig("m"), run=RunConfig(seed=seed))) for seed in (1, 2))
    assert len(first) > 50
    [found] = compare([{"config": first}, {"config": first}, {"config": second}])
    assert (found.verdict, found.where) == ("stop", "node 2")
    assert found.found == "setting run.seed = 1 on node 0, 2 on node 2"
    assert compare([{"config": first}] * 2)[0].verdict == "ok"


def test_source_that_differs_is_named_by_its_file(tmp_path):
    for node in ("a", "b"):
        (tmp_path / node / "x").mkdir(parents=True)
        (tmp_path / node / "x" / "same.py").write_text("1")
        (tmp_path / node / "grpo.py").write_text(node)
    (tmp_path / "b" / "new.py").touch()
    nodes = [{"code": code(tmp_path / node)} for node in ("a", "b")]
    assert digest(nodes[0]["code"]) != digest(nodes[1]["code"])
    [found] = compare(nodes)
    assert found.verdict == "stop"
    assert found.found == "file grpo.py differs on node 1; file new.py is only on node 1"


def test_many_differences_are_counted():
    [found] = compare([{"versions": {}}, {"versions": {f"p{i:02}": "1" for i in range(30)}}])
    assert found.found.endswith("and 26 more") and found.found.count("only on node 1") == 4


def test_addresses_are_tried_from_the_address_that_will_be_used():
    with listening("127.0.0.1") as port:
        assert connects("127.0.0.1", port, "127.0.0.1") == ""
    assert "refused" in connects("127.0.0.1", port, "127.0.0.1")
    with listening("192.0.2.1") as port:
        assert port == 0
    assert connects("192.0.2.1", port, "127.0.0.1") == "nothing can listen there"
    for told in together(2, lambda meeting: reach(meeting, "127.0.0.1")):
        assert [row.verdict for row in told] == ["ok"]


def test_the_node_that_nobody_reaches_is_the_one_that_is_named():
    dead = "no answer within 3 s"
    failed = [{2: dead}, {2: dead}, {0: dead, 1: dead, 3: dead}, {2: dead}]
    [found] = reach_findings(failed, ["10.0.0.1", "10.0.0.2", "10.9.9.3", "10.0.0.4"])
    assert (found.verdict, found.where) == ("stop", "node 2") and "10.9.9.3 -> 10.0.0.1" in found.found
    assert "2 more" in found.found and "GLOO_SOCKET_IFNAME" in found.fix


@pytest.mark.parametrize("nodes", [2, 16, 17, 100])
def test_everybody_is_tried_by_somebody(nodes):
    tried = {other for node in range(nodes) for other in peers(node, nodes)}
    assert tried == set(range(nodes))
    assert all(node not in peers(node, nodes) and len(peers(node, nodes)) <= 15 for node in range(nodes))


@pytest.mark.parametrize(("world", "per_node"), [(1, 1), (2, 1), (8, 4), (16, 8), (9, 3), (384, 8)])
def test_links_are_timed_in_rounds_in_which_no_rank_has_two_partners(world, per_node):
    pairs = [pair for one in rounds(world, per_node) for pair in one]
    assert len(pairs) == len(set(pairs)) and all(a < b for a, b in pairs)
    for one in rounds(world, per_node):
        ranks = [rank for pair in one for rank in pair]
        assert len(ranks) == len(set(ranks))
    assert {rank for pair in pairs for rank in pair} == (set(range(world)) if world > 1 else set())
    if world <= 8:
        assert len(pairs) == world * (world - 1) // 2
    else:
        assert len(rounds(world, per_node)) <= 8


def test_a_slow_and_a_broken_link_are_named():
    links = [Link(a, b, 1e-5, 1e10) for a, b in ((0, 1), (2, 3), (0, 2), (1, 3), (0, 3))]
    links += [Link(1, 2, 1e-5, 1e8)]
    found = link_findings(links, 2)
    assert [row.verdict for row in found] == ["ok", "ok", "warn"] and found[-1].where == "ranks 1 and 2"
    [broken] = link_findings([Link(0, 1, 0.0, 0.0, "Connection closed")], 1)
    assert broken.verdict == "stop" and broken.where == "ranks 0 and 1" and "Connection closed" in broken.found
