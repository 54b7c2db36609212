"""Laws of the whole stack, on real engines: samples don't depend on the layout, vLLM says what Megatron says, and a
refresh leaves vLLM with exactly the policy's weights."""

import pytest

from spmd.whole import PROMPTS, RESPONSE, SAMPLES, case, check_greedy, run

pytestmark = pytest.mark.engine

# ranks, training tensor, context and pipeline, rollout tensor
LAYOUTS = [(1, 1, 1, 1, 1), (2, 2, 1, 1, 1), (2, 1, 1, 2, 2)]
MORE_LAYOUTS = [(2, 1, 2, 1, 1), (4, 2, 1, 2, 2)]
"""With --full, and so the dense families beside the one that all layouts have."""
# The families of experts and latent attention: layout as above, and how experts, stages and replicas are laid out.
SPARSE = {
    "qwen3_moe": ((2, 1, 1, 1, 2), {"parallel.expert": 2, "rollout.expert_parallel": True}),
    "qwen2_moe": ((4, 2, 1, 2, 2), {"parallel.layers_per_stage": "1 3", "parallel.expert_tensor": 2}),
    "deepseek_v3": ((2, 2, 1, 1, 1), {"parallel.expert": 2, "rollout.data": 2, "rollout.expert_parallel": True}),
    "deepseek_v3-yarn": ((2, 1, 1, 2, 2), {"parallel.virtual": 2}),
}
# Rank, parameter of its engine and element that a last refresh finds changed.
FLIPS = {
    # (Its experts lie alike on both sides: the engine reads training's own memory, and there is no second copy.)
    "qwen3_moe": (1, "model.layers.1.self_attn.o_proj.weight", 70 * 128 + 5),
    "deepseek_v3-yarn": (0, "model.layers.2.self_attn.kv_b_proj.weight", 70 * 512 + 7),
}


@pytest.fixture(scope="module")
def runs(request, tiny_models, tmp_path_factory):
    """Every layout on one model, and every model in one layout; each start of the engines serves all tests."""
    exports, full = tmp_path_factory.mktemp("exports"), request.config.getoption("full")
    layouts = LAYOUTS + (MORE_LAYOUTS if full else [])
    wanted = [("qwen2-tied", layout, "-".join(map(str, layout)), {}) for layout in layouts]
    wanted += [(model, LAYOUTS[1], model, {}) for model in ("qwen3", "llama") if full]
    wanted += [(model, layout, model, {"flip": FLIPS.get(model)} | more) for model, (layout, more) in SPARSE.items()]
    found = {}
    for size in sorted({layout[0] for _, layout, _, _ in wanted}):
        here = [entry for entry in wanted if entry[1][0] == size]
        cases = [case(tiny_models[name], *layout[1:], exports / place, **more) for name, layout, place, more in here]
        for (model, layout, _, _), reports in zip(here, run(size, cases), strict=True):
            found[model, layout] = reports
    return found, exports


def dense(found: dict) -> list[tuple]:
    """Return each layout of the model that all layouts have, and what its rank 0 says, but for one rank alone."""
    return [(layout, found[model, layout][0]) for model, layout in found if model == "qwen2-tied"][1:]


def test_samples_do_not_depend_on_the_layout(runs):
    found, _ = runs
    alone = found["qwen2-tied", LAYOUTS[0]][0]
    assert len(alone["rounds"][0]["responses"]) == PROMPTS * SAMPLES
    assert len(set(alone["rounds"][0]["responses"])) > PROMPTS * SAMPLES // 2, "the samples hardly differ"
    for layout, other in dense(found):
        for mine, theirs in zip(alone["rounds"], other["rounds"], strict=True):
            assert theirs["responses"] == mine["responses"], layout


def test_vllm_gives_the_log_probabilities_of_megatron_before_and_after_an_update(runs):
    found, _ = runs
    for (model, layout), reports in found.items():
        for one in reports[0]["rounds"]:
            assert one["learned"]["correction/logprob_gap_max"] < 1e-4, (model, layout)
            assert one["learned"]["grad_norm"] > 0.01
            assert one["canary"]["correction/canary_gap"] < 1e-4, (model, layout)


def test_one_changed_element_on_one_rank_stops_the_refresh_with_its_slice_parameter_and_rank(runs):
    found, _ = runs
    texts = {model: {report["flipped"] for report in found[model, SPARSE[model][0]]} for model in FLIPS}
    # Rank 1 of the engine has the second half of the columns; both ranks train all of them.
    assert texts["qwen3_moe"] == {
        "weights differ between ranks or between training and rollout, in 1 slices of tensors:\n"
        "  model.layers.1.self_attn.o_proj.weight[0:128, 128:256]: not as in "
        "decoder.layers.1.self_attention.linear_proj.weight of training on rank 0 (2 of 3 copies agree): "
        "model.layers.1.self_attn.o_proj.weight of rollout on rank 1"
    }
    # Layer 2 is the first of the second chunk of stage 0; every rank of the engine says the same.
    assert texts["deepseek_v3-yarn"] == {
        "weights differ between ranks or between training and rollout, in 1 slices of tensors:\n"
        "  model.layers.2.self_attn.kv_b_proj.weight[0:128, 0:512]: not as in "
        "1.decoder.layers.0.self_attention.linear_kv_up_proj.weight of training on rank 0 (1 of 2 copies agree): "
        "model.layers.2.self_attn.kv_b_proj.weight of rollout on rank 0"
    }


def test_the_update_is_the_same_in_every_layout(runs):
    found, _ = runs
    alone = found["qwen2-tied", LAYOUTS[0]][0]
    for _, other in dense(found):
        for mine, theirs in zip(alone["rounds"], other["rounds"], strict=True):
            assert theirs["learned"]["grad_norm"] == pytest.approx(mine["learned"]["grad_norm"], rel=1e-4)
            assert theirs["learned"]["actor/entropy"] == pytest.approx(mine["learned"]["actor/entropy"], rel=1e-4)


def test_a_refresh_moves_the_bytes_that_are_missing_and_no_others(runs):
    found, _ = runs

    def received(layout):
        return {one["moved"]["bytes/reshard_to_infer/network"] for one in found["qwen2-tied", layout][0]["rounds"]}

    assert received(LAYOUTS[0]) == {0}
    # A rank of two holds half of each of the 4 layers' matrices and of the 515 embeddings, and misses the rest: fused
    # attention 256 x 128 with 256 biases, its output 128 x 128, gate and up 512 x 128, down 128 x 256. Megatron pads
    # the embeddings to 516 rows: the second rank holds 257 of them and misses 258.
    layer = (256 * 128 + 256 + 128 * 128 + 512 * 128 + 128 * 256) // 2
    assert received(LAYOUTS[1]) == {4 * (4 * layer + 258 * 128)}


def test_the_table_names_the_engines_own_parameters(runs):
    found, _ = runs
    for key, reports in found.items():
        for report in reports:
            assert report["engine"] == report["shard"], key


def test_after_an_update_vllm_answers_greedily_as_huggingface_does_from_the_exported_directory(runs):
    found, exports = runs
    for (model, layout), reports in found.items():
        check_greedy(reports[0], exports / (model if model != "qwen2-tied" else "-".join(map(str, layout))), RESPONSE)
