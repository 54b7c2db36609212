"""Laws of the engine: what a refresh writes is what vLLM would have loaded, and it computes what Hugging Face does."""

import itertools

import pytest
import torch

from spmd.covering import covering
from spmd.engine_ranks import CACHE_BYTES, TEMPERATURE
from spmd.ranks import run_ranks
from spmd.samples import image_prompts
from spmd_rl.models.model_shape import read_model_shape
from tiny_models import make_tiny
from tiny_tokenizer import make_tokenizer

pytestmark = pytest.mark.engine

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
MODELS = {
    "llama": ("llama", {}),
    "qwen2-tied": ("qwen2", {"tied": True}),
    "qwen3": ("qwen3", {}),
    "qwen2_5_vl": ("qwen2_5_vl", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3-yarn": ("deepseek_v3", {"q_lora_rank": None, "rope_parameters": YARN}),
}
SPARSE = tuple(name for name in MODELS if "moe" in name or "deepseek" in name)
# Model, tensor, data, expert parallel, by number of ranks: with four, two groups side by side, and one of everything.
# All of them with --full; else as many as have every pair of two settings once.
CASES = {
    1: [(name, 1, 1, False) for name in MODELS],
    2: [
        *((name, 2, 1, False) for name in MODELS),
        *((name, 2, 1, True) for name in SPARSE),
        *((name, 1, 2, True) for name in SPARSE),
        ("qwen2_moe", 1, 2, False),
    ],
    4: [("deepseek_v3", 1, 2, True), ("qwen3_moe", 2, 2, True)],
}
REQUESTS, SEEING = 3, 6
"""Of a replica; of a model that sees."""
LOOKED = 6
"""Images of those: one that a prompt shows twice is one."""


def requests(name: str) -> int:
    return SEEING if name == "qwen2_5_vl" else REQUESTS


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Name -> two directories: the same model with other weights."""
    root = tmp_path_factory.mktemp("engine")
    made = {
        name: [str(make_tiny(root / f"{name}-{seed}", family, layers=2, seed=seed, **others)) for seed in (7, 8)]
        for name, (family, others) in MODELS.items()
    }
    make_tokenizer(made["qwen2_5_vl"][0], vision=True)
    made["qwen2_5_vl"] += made["qwen2_5_vl"][1:] * 2  # twice more, for a tower that stays as it is
    return made


@pytest.fixture(scope="module", params=CASES, ids=lambda ranks: f"{ranks}-ranks")
def cases(request, models):
    """Case -> what each rank found."""
    ranks = request.param
    named = [(ranks, *one) for ranks, them in CASES.items() for one in them]
    if not request.config.getoption("full"):
        settings = [dict(zip(("model", "tensor", "data", "expert"), one, strict=True)) for _, *one in named]
        named = [named[number] for number in covering(settings, [ranks for ranks, *_ in named])]
    chosen = [tuple(one) for n, *one in named if n == ranks]
    asked = [
        {
            "models": models[name],
            "tensor": tensor,
            "data": data,
            "expert": expert,
            # Requests of each replica; replicas that run in step also with unequal numbers, one of them with none.
            "counts": [[requests(name)] * (ranks // tensor)] + ([[0, 2] * (ranks // tensor // 2)] if data > 1 else []),
        }
        for name, tensor, data, expert in chosen
    ]
    reports = run_ranks("spmd.engine_ranks", ranks, {"cases": asked})
    return {case: [report["cases"][i] for report in reports] for i, case in enumerate(chosen)}


def seen(path, sample) -> dict:
    """Return what transformers' model takes beside a sample's tokens: its images."""
    vision = read_model_shape(path).vision
    _, fields = image_prompts(vision)[sample["id"]] if vision else ((), {})
    if not fields:
        return {}
    types = torch.zeros(1, len(sample["prompt"] + sample["response"]), dtype=torch.int)
    types[0, fields["image_places"]] = 1
    images = {"pixel_values": fields["pixel_values"], "image_grid_thw": fields["image_grids"]}
    return images | {"mm_token_type_ids": types}


@pytest.fixture(scope="module")
def reference(models):
    """Log-probabilities of a sample's response in Hugging Face's model of a name and refresh."""
    import transformers

    found: dict = {}
    loaded: dict = {}

    def logprobs(name, refresh, sample):
        key = (name, refresh, sample["id"], *sample["prompt"], -1, *sample["response"])
        if key not in found:
            path = models[name][refresh]
            if path not in loaded:
                sees = name == "qwen2_5_vl"
                auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
                model = auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
                loaded[path] = model.eval()
            response = torch.tensor(sample["response"])
            with torch.no_grad():
                tokens = torch.tensor([sample["prompt"] + sample["response"]])
                logits = loaded[path](tokens, **seen(path, sample)).logits[0]
            scaled = logits[len(sample["prompt"]) - 1 : -1] / TEMPERATURE
            found[key] = scaled.log_softmax(-1).gather(1, response[:, None])[:, 0]
        return found[key]

    return logprobs


def test_the_tables_write_what_vllms_own_loader_does(cases):
    assert {
        case: [rank["unlike"] for rank in ranks] for case, ranks in cases.items() if any(r["unlike"] for r in ranks)
    } == {}


def test_log_probabilities_are_hugging_faces_after_every_refresh(cases, reference):
    for (name, *_), ranks in cases.items():
        for found in ranks:
            for refresh, generated in enumerate(found["refreshes"]):
                for sample in itertools.chain(*generated):
                    gap = torch.tensor(sample["logprobs"]) - reference(name, refresh, sample)
                    assert gap.abs().max() < 1e-4, (name, refresh, gap)


def test_samples_are_the_same_on_every_rank_and_replica(cases):
    for (name, *_), ranks in cases.items():
        first = ranks[0]["refreshes"]
        for refresh, found in itertools.product(range(2), ranks):
            every = [generated[0] for generated in (first[refresh], found["refreshes"][refresh])]
            assert [[s["response"] for s in samples] for samples in every][0] == [s["response"] for s in every[1]]
            assert len(every[1]) == requests(name)


def test_an_image_goes_through_the_tower_once_a_refresh_and_no_more_where_the_tower_stays_as_it_is(cases):
    for (name, *_), ranks in cases.items():
        for found in ranks:
            expected = [LOOKED, 2 * LOOKED, 3 * LOOKED, 3 * LOOKED] if name == "qwen2_5_vl" else [0, 0]
            assert found["looked"] == expected, name


def test_replicas_that_run_in_step_may_have_unequal_numbers_of_requests(cases):
    for (_, tensor, data, _), ranks in cases.items():
        if data > 1:
            for rank, found in enumerate(ranks):
                counts = [[len(samples) for samples in generated] for generated in found["refreshes"]]
                assert counts == [[REQUESTS, 2 * (rank // tensor % 2)]] * 2


def test_asleep_no_weight_takes_memory_and_awake_only_what_is_read_as_it_is(cases):
    for ranks in cases.values():
        for found in ranks:
            assert found["asleep"] == 0
            assert found["awake"] > 0


def test_the_cache_takes_what_it_was_given_and_no_more(cases):
    for ranks in cases.values():
        for found in ranks:
            assert 0 < found["cache"] <= CACHE_BYTES
