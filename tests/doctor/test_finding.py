"""Test what a person and a program read of the findings."""

import json

from spmd_rl.doctor.finding import Finding, as_json, at, from_plain, merged, status, table

GOOD = Finding("disk", "fast", "ok")
SLOW = Finding("disk", "slow", "warn", "buy another")
BAD = Finding("port", "in use", "stop", "use another", "node 1")


def test_only_what_stops_a_run_gives_an_exit_status():
    assert status([GOOD, SLOW]) == 0
    assert status([GOOD, BAD]) == 1
    assert status([]) == 0


def test_the_table_says_how_to_mend_what_is_off_and_nothing_else():
    text = table([GOOD, SLOW, BAD])
    assert "-> buy another" in text and "-> use another" in text and "node 1" in text
    assert text.endswith("1 would stop a run; 1 to look at")
    assert "->" not in table([GOOD])
    assert all(len(line) <= 120 for line in table([Finding("x", "word " * 200, "stop", "way " * 100)]).splitlines())


def test_nodes_that_say_the_same_share_a_row():
    rows = [*at("node 0", [GOOD, SLOW]), *at("node 1", [GOOD])]
    assert [(row.found, row.where) for row in merged(rows)] == [("fast", "nodes 0, 1"), ("slow", "node 0")]
    many = merged([row for node in range(20) for row in at(f"node {node}", [GOOD])])
    assert [row.where for row in many] == ["20 nodes"]


def test_json_holds_every_row_and_comes_back():
    told = json.loads(as_json([GOOD, BAD]))
    assert told["status"] == 1
    assert from_plain(told["findings"]) == [GOOD, BAD]
