"""Test what `plan` says of a device: fits or not, what would, how fast, beside a run, as a picture."""

import json
import re
from pathlib import Path

import pytest

from spmd_rl.estimate.work import Work
from spmd_rl.plan.__main__ import _parse, configure, main
from spmd_rl.plan.candidates import judged, nearest, suggest

CONFIGS = Path(__file__).parents[1] / "configs"
ROW = re.compile(r"\| `([\w*.]+\.yaml)` \|[^|]*\| (\d+) \| (\d+) \| (.*) \|")
TABLE = {name: (int(ranks), int(node)) for name, ranks, node, _ in ROW.findall((CONFIGS / "README.md").read_text())}
LARGE = [name for name in TABLE if re.search(r"_a[23](_lab)?\.yaml$", name)]
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
}


def case_of(name, *words):
    ranks, node = TABLE[name]
    device = "a2" if "_a2" in name else "a3"
    sizes = ["--world-size", str(ranks), "--ranks-per-node", str(node), "--device", device]
    case, _ = configure(*_parse(["--config", str(CONFIGS / name), *sizes, *words]))
    return case, case.device, int(case.device.memory * case.run.kernels.share)


@pytest.mark.parametrize("name", LARGE)
def test_the_published_layouts_are_judged_and_those_that_are_shipped_fit(name):
    case, device, room = case_of(name)
    found = judged(case, {}, device, room, Work.of(case.shape))
    assert found.bytes <= room, (name, found)
    assert 20 < found.tokens_per_second / case.world_size < 5000


def test_twice_the_published_micro_batch_of_seven_billion_parameters_does_not_fit_and_what_would_is_said():
    case, device, room = case_of("grpo_qwen25_7b_a3.yaml", "--train.tokens_per_microbatch", "32768")
    found = judged(case, {}, device, room, Work.of(case.shape))
    assert found.phase == "update" and found.bytes > room
    near = nearest(case, device, room)
    assert {"train.tokens_per_microbatch": 16384} in [one.changes for one in near]  # as published
    assert all(one.bytes <= room for one in near)
    speeds = [one.tokens_per_second for one in near]
    assert speeds == sorted(speeds, reverse=True)


def test_layouts_are_suggested_that_fit_and_divide_the_fastest_first():
    case, device, room = case_of("grpo_qwen25_7b_a3.yaml")
    found = suggest(case, device, room)
    speeds = [one.tokens_per_second for one in found]
    assert found and speeds == sorted(speeds, reverse=True) and all(one.bytes <= room for one in found)
    assert speeds[0] >= judged(case, {}, device, room, Work.of(case.shape)).tokens_per_second
    assert all(28 % one.changes.get("parallel.tensor", 2) == 0 for one in found)


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "run.yaml").write_text(f"model: {{path: {tmp_path}, dtype: float32}}\nrun: {{platform: cpu}}\n")
    return tmp_path


def test_a_device_gives_time_what_divides_what_and_a_verdict(tiny, capsys):
    words = ["--model.path", str(tiny), "--world-size", "8", "--parallel.tensor", "2"]
    main([*words, "--device", "h100", "--suggest"])
    said = capsys.readouterr().out
    assert "parallel.tensor 2 divides 8 heads, 4 of keys and values" in said
    assert "a step on h100: about" in said and "of 989.4 Tflop/s 40% are reached" in said
    assert "It fits: " in said and "layouts that fit, the fastest first" in said
    assert max(map(len, said.splitlines())) <= 120
    main([*words, "--device", "h100", "--device-gib", "4", "--rollout.cache_gib", "0.2"])
    assert "It would NOT fit into the 3.9 GiB" in capsys.readouterr().out


def test_a_device_of_another_platform_than_the_configurations_is_refused(tiny, capsys):
    with pytest.raises(SystemExit):
        main(["--config", str(tiny / "run.yaml"), "--device", "a2"])
    assert "--device = a2: run.platform is cpu" in capsys.readouterr().err


def test_predictions_stand_beside_a_runs_measurements(tiny, capsys):
    (tiny / "config.yaml").write_text((tiny / "run.yaml").read_text())
    rows = [
        {"step": 1, "prompt_length/mean": 20.0, "response_length/mean": 30.0, "memory/start/resident_bytes": 1e9},
        {"step": 2, "memory/update/peak_bytes": 2e9, "bytes/reshard_to_infer/network": 0.0, "timing/update": 5.0},
    ]
    (tiny / "metrics.jsonl").write_text("".join(json.dumps(row | {"time": 0.0}) + "\n" for row in rows))
    (tiny / "ranks.jsonl").write_text(json.dumps({"step": 2, "memory/resident_bytes": [1, 2]}) + "\n")
    main(["--compare", str(tiny), "--device", "cpu", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["ranks"] == 2 and answer["time"]["response_tokens"] == 30.0
    compared = answer["compared"]
    # What is there before the first verb: the process, and the weights.
    assert compared["base_bytes"] == 1e9 - answer["figures"]["training_bytes"]["most"]
    row = next(one for one in compared["rows"] if one["name"] == "memory/update/peak_bytes")
    assert row["measured"] == 2e9 and row["ratio"] == row["predicted"] / 2e9
    added = row["predicted"] - compared["base_bytes"]
    assert added == answer["memory"]["estimate"]["update"]["bytes"]
    assert row["added_ratio"] == added / (2e9 - compared["base_bytes"])
    main(["--compare", str(tiny), "--device", "cpu"])
    said = capsys.readouterr().out
    assert "are in both" in said and "added" in said and "timing/update" in said
    with pytest.raises(SystemExit):
        main(["--compare", str(tiny / "nothing")])
    assert "name the directory of a run that made a step" in capsys.readouterr().err


def test_a_start_on_a_cpu_is_the_weights_and_what_is_read_of_their_file(tiny, capsys):
    def start(*words):
        main(["--config", str(tiny / "run.yaml"), "--world-size", "2", *words, "--json"])
        answer = json.loads(capsys.readouterr().out)
        return answer["memory"]["estimate"]["start"]["parts"], answer["figures"]["training_bytes"]["most"]

    # Of a small model the engine takes more than the file, and comes later: a page of 2 MiB or less for each weight.
    small, weights = start()
    each = [512 * 4] * 17 + [4096 * 512 * 4] * 2 + [n * 512 * 4 for n in (1024, 512, 3072, 1536) for _ in range(8)]
    assert small == {"weights": weights, "engine": sum(min(2 << 20, one) for one in each)}
    large, weights = start("--model.path", str(CONFIGS / "models" / "Qwen2.5-7B"))
    embedding = 152064 * 3584 * 4
    assert large == {"weights": weights, "files": embedding - (68 << 20)}


def test_memory_over_a_step_is_drawn(tiny):
    main(["--model.path", str(tiny), "--world-size", "2", "--device", "a2", "--picture", str(tiny / "memory.png")])
    assert (tiny / "memory.png").read_bytes().startswith(b"\x89PNG")
