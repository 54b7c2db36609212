import json
import subprocess
import sys
from pathlib import Path

import pytest
from models.test_qwen2_5_vl import PUBLISHED as QWEN2_5_VL_3B

from spmd_rl.plan.__main__ import main
from spmd_rl.plan.sizes import in_bytes

# Sizes as published with DeepSeek-V3: 671 billion parameters.
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
}
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


@pytest.fixture
def run(tmp_path, capsys):
    """Give a model's config.json and words of the command line, get what is printed."""

    def call(model, *words):
        (tmp_path / "config.json").write_text(json.dumps(model))
        (tmp_path / "run.yaml").write_text(f"model: {{path: {tmp_path}}}\nrun: {{tensorboard: false}}\n")
        main(["--config", str(tmp_path / "run.yaml"), *words])
        return capsys.readouterr().out

    return call


def refused(call, capsys, *words):
    with pytest.raises(SystemExit) as ended:
        call(*words)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


DENSE = ("--parallel.tensor", "8", "--parallel.pipeline", "4", "--rollout.tensor", "4")
SPARSE = (
    *("--parallel.tensor", "8", "--parallel.pipeline", "12", "--parallel.expert", "32"),
    *("--parallel.layers_per_stage", *"555555555556"),
    *("--rollout.tensor", "4", "--rollout.data", "8", "--rollout.expert_parallel", "true"),
)


@pytest.mark.long
def test_a_model_of_671_billion_parameters_is_planned_for_384_ranks_from_its_config_alone(run):
    answer = json.loads(run(DEEPSEEK_V3, *SPARSE, "--world-size", "384", "--json"))
    assert round(answer["model"]["parameters"] / 1e9) == 671
    assert "8 of 256 experts" in answer["training"] and "12 groups of 32 ranks" in answer["rollout"]
    figures = answer["figures"]
    assert answer["network_bytes"] == round(figures["sent_bytes"]["mean"] * 384)
    assert figures["sent_bytes"]["mean"] == figures["received_bytes"]["mean"]
    for way in ("sent", "received"):
        assert figures[f"{way}_fullest_round_bytes"]["most"] <= answer["bucket_bytes"]
        parts = [figures[f"{way}_{where}_bytes"]["mean"] for where in ("same_node", "other_nodes")]
        assert sum(parts) == pytest.approx(figures[f"{way}_bytes"]["mean"])
    # The engine holds 8 experts of 58 layers, which are 3 matrices of 2048 x 7168 in bfloat16, and the rest.
    experts = 58 * 8 * 3 * 2048 * 7168 * 2
    assert experts < figures["engine_bytes"]["least"] < 1.5 * experts
    assert [entry["tensors"].rpartition(".experts.")[2] for entry in answer["largest_kinds"][:3]] == [
        f"*.{name}_proj.weight" for name in ("down", "gate", "up")
    ]


def test_a_model_that_sees_is_planned_with_its_tower(run):
    out = run(QWEN2_5_VL_3B, "--world-size", "8")
    assert "32 layers and a projector, 0.669 billion of the parameters" in out
    assert "the first refresh alone moves them" in out
    some = run(QWEN2_5_VL_3B, "--world-size", "8", "--model.freeze", "vision")
    assert "the first refresh alone moves 0.632 billion of them" in some
    assert "refresh alone" not in run(QWEN2_5_VL_3B, "--world-size", "8", "--model.freeze", "none")


def test_a_person_reads_layouts_rounds_and_sizes_with_units(run):
    out = run(LLAMA_70B, *DENSE, "--world-size", "64")
    assert "llama, 70.6 billion parameters, bfloat16" in out
    assert "tensor 8, pipeline 4, data 2, 20 layers in a stage" in out
    assert "16 engines of 4 ranks (tensor 4)" in out
    assert "in each a rank receives and sends at most 256.0 MiB" in out
    for label in ("held in training", "held by the engine", "received", "from other nodes", "sent"):
        (line,) = [line for line in out.splitlines() if line.strip().startswith(label)]
        assert line.count(" GiB") + line.count(" MiB") == 3
    assert "model.layers.*.mlp.down_proj.weight" in out
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.long
def test_what_models_take_of_a_device_is_said_by_phase_and_a_device_too_small_is_refused(run, capsys):
    words = (*DENSE, "--world-size", "64", "--rollout.cache_gib", "10")
    out = run(LLAMA_70B, *words, "--device-gib", "60")
    [update] = [line for line in out.splitlines() if line.startswith("update ")]
    assert update.count(" GiB") == 3 and "leaves" in out
    memory = json.loads(run(LLAMA_70B, *words, "--json"))["memory"]["phases"]
    # 2 bytes of weights, 4 of gradients; of the optimizer a part at a time.
    weights = memory["old_log_p"]["most"]
    assert memory["update"]["most"] == weights * (2 + 4) // 2 + (2 << 30) and "margin" not in memory["update"]
    said = refused(run, capsys, LLAMA_70B, *words, "--device-gib", "40")
    assert "rollout.cache_gib = 10.00: the engine's weights" in said


@pytest.mark.long
def test_it_is_said_how_many_samples_an_engines_cache_holds(run):
    words = (*DENSE, "--world-size", "64", "--train.prompts_per_step", "128")
    # A token takes 80 layers x 2 x 2 heads of 128 in bfloat16, which are 80 KiB; a sample has 1536 tokens.
    said = " ".join(run(LLAMA_70B, *words, "--rollout.cache_gib", "10").split())
    assert "cache 10.00 GiB a rank, room for 85 samples of 1536 tokens at once; an engine makes 64 in a step" in said
    assert "--device-gib says how many fit beside the weights" in " ".join(run(LLAMA_70B, *words).split())
    words = (*words, "--device-gib", "60", "--rollout.memory_fraction", "0.6")
    assert "fewer than the 64 that an engine could run of its 64" in " ".join(run(LLAMA_70B, *words).split())


def test_layouts_that_agree_are_said_to_move_nothing(run):
    words = ("--parallel.tensor", "8", "--world-size", "16", "--rollout.tensor")
    assert "No bytes cross the network" in run(LLAMA_70B, *words, "8")
    assert "go from rank to rank" in run(LLAMA_70B, *words, "4")


@pytest.mark.long
def test_the_fewest_ranks_that_fit_are_taken_where_none_are_named(run):
    assert json.loads(run(LLAMA_70B, *DENSE, "--json"))["ranks"] == 32
    assert "ranks       32, 8 on a node (the fewest that fit; see --world-size)" in run(LLAMA_70B, *DENSE)


@pytest.mark.long
def test_one_rank_is_shown_with_its_place_and_its_peers(run):
    words = (*DENSE, "--world-size", "64", "--rank", "17")
    rank = json.loads(run(LLAMA_70B, *words, "--json"))["rank"]
    assert rank["training_place"] == {"pipeline": 1, "data": 0, "tensor": 1}
    assert rank["rollout_place"] == {"engine": 4, "tensor": 1} and rank["node"] == 2
    for way in ("received_bytes", "sent_bytes"):
        assert sum(peer[way] for peer in rank["peers"]) == rank[way]
    out = run(LLAMA_70B, *words)
    assert "rank 17, on node 2" in out and "pipeline 1, data 0, tensor 1" in out
    peers = [line for line in out.splitlines() if line.startswith("rank ") and "node" not in line]
    assert len(peers) == len(rank["peers"])


@pytest.mark.long
def test_the_bucket_and_the_nodes_can_be_set(run):
    words = (*DENSE, "--world-size", "64", "--json")
    usual, small = (json.loads(run(LLAMA_70B, *words, *more)) for more in ((), ("--rollout.refresh_bucket_mib", "64")))
    assert small["bucket_bytes"] == 64 << 20 and small["rounds"] > 2 * usual["rounds"]
    one = json.loads(run(LLAMA_70B, *words, "--ranks-per-node", "64"))
    assert one["figures"]["received_other_nodes_bytes"]["most"] == 0


def test_what_a_run_would_refuse_is_refused_with_the_same_words(run, capsys):
    said = refused(run, capsys, LLAMA_70B, "--parallel.tensor", "3", "--rollout.tensor", "5", "--world-size", "16")
    assert "parallel.tensor x parallel.pipeline = 3 x 1: does not divide the 16 ranks" in said
    assert "rollout.tensor = 5: does not divide the 16 ranks" in said
    assert "parallel.tensor = 3: the model has 64 attention heads" in said
    assert "Traceback" not in said
    assert "parallel.tensro: there is no such setting" in refused(run, capsys, LLAMA_70B, "--parallel.tensro", "3")
    assert "--rank = 32: there are 32 ranks; use 0 to 31" in refused(run, capsys, LLAMA_70B, *DENSE, "--rank", "32")
    assert "--world-size: 1 or more" in refused(run, capsys, LLAMA_70B, "--world-size", "0")
    assert "invalid choice: 'nothing'" in refused(run, capsys, LLAMA_70B, "--show", "nothing")


def test_what_does_not_bear_on_the_weights_is_only_mentioned(run):
    out = run(LLAMA_70B, *DENSE, "--world-size", "256", "--data.source", "there/is/none.jsonl")
    assert "A run would still be refused here:\n" in out
    assert "data.source = there/is/none.jsonl: there is no such file" in out
    assert "train.prompts_per_step = 32: there are 64 inference engines" in out


def test_it_works_without_torch_and_so_do_the_records_of_the_platforms():
    ask = "import sys, spmd_rl.plan; from spmd_rl.platforms import names, record; records = [*map(record, names())]"
    ask += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", ask], cwd=Path(__file__).parent.parent).returncode == 0


def test_sizes_are_told_in_the_unit_that_suits_them():
    assert [in_bytes(n) for n in (0, 1, 1536, 5 << 20, 3 << 30, 2 << 40)] == [
        *("0", "1 B", "1.5 KiB", "5.0 MiB", "3.0 GiB", "2.0 TiB"),
    ]


def test_a_critic_is_held_beside_the_policy(run):
    words = ("--world-size", "8", "--parallel.tensor", "8", "--algorithm.advantage", "gae")
    assert "of the critic" not in run(LLAMA_70B, *words[:-1], "grpo")
    answer = json.loads(run(LLAMA_70B, *words, "--json"))
    # The policy's layer over the vocabulary is its own; the critic has a head of one row in its stead.
    policy, critic = (answer["figures"][f"{name}_bytes"]["most"] for name in ("training", "critic"))
    assert policy - critic == 2 * 8192 * (128256 // 8 - 1)
    assert "of the critic" in run(LLAMA_70B, *words)
    lost = run(LLAMA_70B, *words, "--critic.path", "nowhere")
    assert "of the critic" not in lost and "critic.path = nowhere: there is no such directory" in lost
