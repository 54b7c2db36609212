"""Several hosts for real: a network, process numbers and a host name for each, and TCP between them."""

import json
import re
from pathlib import Path

import pytest

from deadlines import crowding
from launch.nodes import Nodes, ended, ip, require_namespaces
from spmd.test_program import flags, start

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def namespaces():
    require_namespaces()


def test_two_nodes_that_fit_are_told_so_with_their_link_timed(tiny_models, tmp_path):
    words = ["-m", "spmd_rl.doctor", "--model.path", tiny_models["llama"], "--run.dir", str(tmp_path / "run")]
    with Nodes(2) as nodes:
        running = [nodes.launch(node, words) for node in range(2)]
        first, second = ended(running, 120)
    assert [process.returncode for process in running] == [0, 0], first + second
    assert re.search(r"launch: 2 nodes are ready: same code \w{12} .* same config \w{12}", first)
    assert "eth0 (10.77.0.1)" in first and "eth0 (10.77.0.2)" in first
    assert re.search(r"reach .* 2 nodes open connections to each other", first)
    assert re.search(r"links .* 1 between nodes: \d+ us, \d+\.\d\d GB/s", first)
    assert "nothing would stop a run" in first
    assert "links" not in second, "one table for all"


def test_nodes_that_do_not_fit_are_refused_with_all_that_differs_before_any_rank_starts(tiny_models, tmp_path):
    words = ["-m", "spmd_rl.grpo", "--model.path", tiny_models["llama"], "--run.dir", str(tmp_path / "run")]
    with Nodes(2) as nodes:
        inside = f"{nodes.tag}n1"
        ip("-n", inside, "link", "add", "dead0", "type", "veth", "peer", "name", "dead1")
        ip("-n", inside, "addr", "add", "10.88.0.9/24", "dev", "dead0")
        for end in ("dead0", "dead1"):
            ip("-n", inside, "link", "set", end, "up")
        running = [nodes.launch(0, words), nodes.launch(1, [*words, "--run.seed", "2"], GLOO_SOCKET_IFNAME="dead0")]
        told = ended(running, 120)
    assert [process.returncode for process in running] == [1, 1]
    for text in told:
        assert "setting run.seed = 1 on node 0, 2 on node 1" in text
        assert re.search(r"stop +reach +node \d +10\.(77\.0\.1 -> 10\.88\.0\.9|88\.0\.9 -> 10\.77\.0\.1)", text)
        assert "GLOO_SOCKET_IFNAME" in text and "launch: not started" in text
        assert "Traceback" not in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("count", [2, 3])
def test_a_node_that_is_gone_ends_the_run_with_an_error_that_names_its_rank(count, tmp_path):
    """With two nodes the last one dies; with three its cable is pulled, of which nobody is told."""
    go = tmp_path / "go"
    last = count - 1
    with Nodes(count) as nodes:
        running = [nodes.launch(node, ["tests/launch/verb_ranks.py", str(go)], CHECK="0") for node in range(count)]
        lines = []
        for line in running[0].stdout:
            lines.append(line)
            if line.startswith("answers"):
                break
        # Ranks of other nodes are not taken for ranks of this one, and not for ranks of this machine.
        total = sum(range(1, count + 1))
        assert f"sum {total} of {count} ranks, 1 a node, reads peers: False\n" in lines, "".join(lines)
        if count == 3:
            nodes.cut(last)
        else:  # until the last process of the node is gone, its rank may take the verb, and rank 0 ends well
            running[last].kill()
            ended([running.pop()], 60)
        go.touch()
        told = ended(running, 60)
    assert all(process.returncode for process in running)
    # Of a node that is dead, rank 0 may hear from the network, or hear nothing more.
    assert re.search(rf"MissingRanks: rank {last} (did not arrive|is gone) at verb 'next'", told[0]), told[0]
    if count == 3:
        # The one that was cut off ends too, when the kernel gives up on node 0.
        assert "DistNetworkError" in told[last] or "Connection" in told[last]


def learning(directory: Path) -> dict[str, object]:
    """Return settings with which tensor ranks of a run learn something; writes a rule into the directory."""
    (directory / "rule.py").write_text("def odd(sample):\n    return len(sample.response) % 2\n")
    return {
        "parallel.tensor": 2,
        "train.learning_rate": 1e-3,
        "evaluation.before": False,
        "evaluation.after": False,
        "reward.rules": (f"{directory / 'rule.py'}:odd", "1.0"),
    }


def test_a_run_on_two_nodes_ends_in_the_weights_of_the_same_run_on_one(tiny_models, tmp_path):
    """Tensor parallel over the network on purpose: each refresh then sends half of the weights over it."""
    from safetensors.torch import load_file

    others = learning(tmp_path)
    with Nodes(2) as nodes:
        words = ["-m", "spmd_rl.grpo", *flags(tiny_models["llama"], tmp_path / "two", **others)]
        running = [nodes.launch(node, words, CHECK="0") for node in range(2)]
        told = ended(running, 200)
    assert [process.returncode for process in running] == [0, 0], "".join(told)[-4000:]
    alone = start(flags(tiny_models["llama"], tmp_path / "one", **others))
    output, _ = alone.communicate(timeout=200 * crowding())
    assert alone.returncode == 0, output[-4000:]
    rows = [json.loads((tmp_path / run / "metrics.jsonl").read_text().splitlines()[-1]) for run in ("one", "two")]
    assert rows[0]["bytes/reshard_to_infer/network"] == rows[1]["bytes/reshard_to_infer/network"] > 1e6
    one, two = (load_file(tmp_path / run / "hf" / "model.safetensors") for run in ("one", "two"))
    assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)
    before = load_file(Path(tiny_models["llama"]) / "model.safetensors")
    assert any(not one[name].equal(before[name]) for name in one), "a run that learned nothing proves nothing"


def test_nodes_that_share_no_disk_save_their_parts_and_go_on_to_the_weights_of_one_that_never_stopped(
    tiny_models, tmp_path
):
    from safetensors.torch import load_file

    others = learning(tmp_path) | {"checkpoint.every_steps": 1, "checkpoint.shared": False}
    disks = [tmp_path / f"node{node}" for node in range(2)]
    for disk in disks:
        disk.mkdir()

    def run(**more: object) -> list[str]:
        words = ["-m", "spmd_rl.grpo", *flags(tiny_models["llama"], Path("mine"), **others, **more)]
        with Nodes(2) as nodes:
            running = [nodes.launch(node, words, disks[node], CHECK="0") for node in range(2)]
            said = ended(running, 200)
        assert [process.returncode for process in running] == [0, 0], "".join(said)[-4000:]
        return said

    run(**{"train.steps": 1, "run.export_hf": False})
    parts = [{path.name for path in (disk / "mine" / "checkpoints").rglob("*.distcp")} for disk in disks]
    assert parts[0] and parts[1] and not parts[0] & parts[1]
    assert "resuming from step 1" in run()[0]
    whole = start(flags(tiny_models["llama"], tmp_path / "whole", **others))
    output, _ = whole.communicate(timeout=200 * crowding())
    assert whole.returncode == 0, output[-4000:]
    one, two = (load_file(place / "hf" / "model.safetensors") for place in (tmp_path / "whole", disks[0] / "mine"))
    assert one.keys() == two.keys() and all(one[name].equal(two[name]) for name in one)


@pytest.mark.parametrize("way", ["a node is cut off", "two nodes lose each other"])
def test_a_dead_link_is_reported_with_the_node_or_the_ranks_at_its_ends(way, tmp_path):
    """Nobody is told of a lost packet: the ranks wait in their exchange, and their clocks tell."""
    count = 2 if way == "a node is cut off" else 3
    asked = {
        "kind": "link",
        "rank": 1,
        "steps": 100_000,
        "rule": "",
        "directory": str(tmp_path),
        "pause": 0.05,
        "hang": {"first_seconds": 300, "minimum_seconds": 300, "deadline_seconds": {"update": 8}, "silent_seconds": 6},
    }
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    with Nodes(count) as nodes:
        for node in range(count):  # the kernel's own patience, as on real nodes: longer than a person's
            ip("netns", "exec", f"{nodes.tag}n{node}", "sysctl", "-qw", "net.ipv4.tcp_retries2=15")
        words = ["tests/spmd/hang_ranks.py", str(tmp_path / "asked.json")]
        running = [nodes.launch(node, words, CHECK="0") for node in range(count)]
        said = []
        for line in running[0].stdout:
            said.append(line)
            if line.startswith("step 40"):  # some heartbeats later
                break
        assert said and said[-1].startswith("step 40"), "".join(said)
        if count == 2:
            nodes.cut(1)
        else:
            for node, other in ((1, 2), (2, 1)):  # frames to the other go to nobody's address
                there = ["to", nodes.address(other), "lladdr", "02:00:00:00:00:99", "nud", "permanent"]
                ip("-n", f"{nodes.tag}n{node}", "neigh", "replace", *there, "dev", "eth0")
        if count == 2:
            # Its rank leaves by itself; torchrun's own agent there waits for as long as the kernel does.
            alone = next(line for line in running[1].stdout if line.startswith("hang: "))
            assert "rank 1 has not reached the launcher's store at" in alone, alone
            running.pop()
        told = ended(running, 120)
    assert all(process.returncode for process in running)
    [report] = (tmp_path / "hang").glob("*/report.txt")
    text = report.read_text()
    assert text.rstrip() in told[0]
    print(way, re.search(r"reported \d+\.\d s after the deadline", text)[0])
    assert re.search(r"rank(s 0-2| 0 \(.*\)) (wait )?in step \d+, update", text.replace("waits", "wait")), text
    if count == 2:
        assert re.search(r"no heartbeat from rank 1 for 6 s", text), text
        assert re.search(r"rank 1 \(node1, .*\) (waits )?in step \d+, .*<- look here first", text), text
        assert "no rank on node1 sends a heartbeat: the node or its link is gone" in text, text
    else:
        assert "no rank has made progress for 8 s, the deadline of update (hang.deadline_seconds)" in text, text
        assert "look here first" not in text and "a link between them is dead" in text, text
        assert "hosts: node0: rank 0; node1: rank 1; node2: rank 2" in text, text
