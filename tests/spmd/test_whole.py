"""Laws of the whole stack, on real engines: samples don't depend on the layout, vLLM says what Megatron says, and a
refresh leaves vLLM with exactly the policy's weights."""

import pytest

from spmd.whole import PROMPTS, RESPONSE, SAMPLES, check_greedy, run

# ranks, training tensor, training pipeline, rollout tensor
LAYOUTS = [(1, 1, 1, 1), (2, 2, 1, 1), (2, 1, 2, 2), (4, 2, 2, 2)]


@pytest.fixture(scope="module")
def runs(tiny_models, tmp_path_factory):
    """Every layout on one model, and every model in one layout; each start of the engines serves all tests."""
    exports = tmp_path_factory.mktemp("exports")
    found = {}
    for layout in LAYOUTS:
        found["qwen2-tied", layout] = run(tiny_models["qwen2-tied"], *layout, exports / "-".join(map(str, layout)))
    for model in ("qwen3", "llama"):
        found[model, LAYOUTS[1]] = run(tiny_models[model], *LAYOUTS[1], exports / model)
    return found, exports


def test_samples_do_not_depend_on_the_layout(runs):
    found, _ = runs
    alone = found["qwen2-tied", LAYOUTS[0]][0]
    assert len(alone["rounds"][0]["responses"]) == PROMPTS * SAMPLES
    assert len(set(alone["rounds"][0]["responses"])) > PROMPTS * SAMPLES // 2, "the samples hardly differ"
    for layout in LAYOUTS[1:]:
        other = found["qwen2-tied", layout][0]
        for mine, theirs in zip(alone["rounds"], other["rounds"], strict=True):
            assert theirs["responses"] == mine["responses"], layout


def test_vllm_gives_the_log_probabilities_of_megatron_before_and_after_an_update(runs):
    found, _ = runs
    for (model, layout), reports in found.items():
        for one in reports[0]["rounds"]:
            assert one["learned"]["correction/logprob_gap_max"] < 1e-4, (model, layout)
            assert one["learned"]["grad_norm"] > 0.01


def test_the_update_is_the_same_in_every_layout(runs):
    found, _ = runs
    alone = found["qwen2-tied", LAYOUTS[0]][0]
    for layout in LAYOUTS[1:]:
        for mine, theirs in zip(alone["rounds"], found["qwen2-tied", layout][0]["rounds"], strict=True):
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
