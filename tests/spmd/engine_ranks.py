"""One rank of tests/spmd/test_engine.py: engines of many models and layouts, one after another in one process."""

import gc

from spmd.ranks import arguments, join, ready, report

TEMPERATURE = 0.8
RESPONSE = 8
CACHE_BYTES = 2**22
KEPT_FROM = 2
"""The refresh from which on a vision tower stays as it is."""


def main() -> None:
    platform = ready("vllm")
    from vllm.distributed import parallel_state
    from vllm.triton_utils import dispatcher

    # The process groups outlive each engine here, for the next one.
    parallel_state.destroy_distributed_environment = lambda: None
    # Each engine would collect garbage seven times, a third of a second each.
    collect, gc.collect = gc.collect, lambda *generation: 0
    world = join(platform)
    found = []
    for case in arguments()["cases"]:
        found.append(_case(case, world, platform))
        # The first engine's kernels stay bound.
        dispatcher._rebind_kernels = lambda *arguments, **options: None
    gc.collect = collect
    report(world.rank, {"cases": found})


def _case(case: dict, world, platform) -> dict:
    import torch.distributed as dist

    from spmd_rl.distributed.layout import RolloutLayout
    from spmd_rl.models.model_shape import read_model_shape
    from spmd_rl.rollout.engine import Engine
    from spmd_rl.weights.families import vllm_shard

    shape = read_model_shape(case["models"][0])
    layout = RolloutLayout(case["tensor"], world.size, case["data"], case["expert"])
    engine = Engine(
        case["models"][0], shape, "float32", layout, 64, 4, CACHE_BYTES, 32, False, 1, platform, images_per_prompt=2
    )
    shard = vllm_shard(shape, layout, world.rank)
    engine.sleep()
    found: dict = {"asleep": _plain_bytes(engine), "unlike": [], "refreshes": [], "looked": []}
    for number, model in enumerate(case["models"]):
        if engine.features is not None:
            engine.features.keep = number >= KEPT_FROM
        engine.wake_weights()
        found["unlike"] += _write(engine, shard, shape, model)
        engine.weights.end()
        engine.wake_cache()
        found["awake"] = _plain_bytes(engine)
        found["cache"] = _cache_bytes(engine)
        replica = layout.replica(world.rank)
        found["refreshes"].append([_generate(engine, counts[replica], shape) for counts in case["counts"]])
        found["looked"].append(engine.features.computed if engine.features is not None else 0)
        engine.sleep()
    # A rank that closes its groups while another is still in one of their calls would end it with an error.
    dist.barrier(world.control)
    engine.close()
    return found


def _plain_bytes(engine) -> int:
    return sum(engine.weights.plain(name).untyped_storage().nbytes() for name in engine.weights)


def _cache_bytes(engine) -> int:
    from spmd_rl.rollout.packed_weights import _tensors

    storages = (tensor.untyped_storage() for tensor in _tensors(engine._runner.kv_caches))
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _write(engine, shard, shape, model: str) -> list[str]:
    """Refresh from a directory; the names of the parameters in which vLLM's own loader puts something else."""
    import torch

    from spmd_rl.weights.files.hf_reader import load_shard

    parameters = {name: tensor.zero_() for name, tensor in engine.weights.items()}
    load_shard(model, shard, parameters, shape)
    ours = {name: tensor.clone() for name, tensor in parameters.items()}
    for tensor in parameters.values():
        tensor.zero_()
    _load_with_vllm(engine, model)
    unlike = [name for name, tensor in parameters.items() if not torch.equal(tensor, ours[name])]
    for name, tensor in parameters.items():
        tensor.copy_(ours[name])
        engine.weights.written(name)
    return unlike


def _load_with_vllm(engine, model: str) -> None:
    from safetensors.torch import load_file

    engine._runner.get_model().load_weights(iter(load_file(f"{model}/model.safetensors").items()))


def _images(vision, fields):
    """A prompt's images as a request brings them; None for none."""
    from spmd_rl.rollout.requests import PromptImages

    if not fields:
        return None
    grids = [tuple(grid) for grid in fields["image_grids"].tolist()]
    counts, first, spans = fields["image_grids"].prod(-1) // vision.merge**2, 0, []
    for count in counts.tolist():
        spans.append((int(fields["image_places"][first]), count))
        first += count
    return PromptImages(fields["pixel_values"], grids, spans)


def _generate(engine, count: int, shape) -> list[dict]:
    import torch

    from spmd.samples import image_prompts
    from spmd_rl.rollout.requests import Request, SamplingParams

    generator = torch.Generator().manual_seed(17)
    prompts = [torch.randint(3, shape.vocabulary, (5 + 6 * i,), generator=generator).tolist() for i in range(count)]
    requests = [Request(i, tuple(prompts[i]), seed=100 + i) for i in range(count)]
    if shape.vision is not None:
        shown = image_prompts(shape.vision)[:count]
        requests = [
            Request(i, tuple(tokens.tolist()), seed=100 + i, images=_images(shape.vision, fields))
            for i, (tokens, fields) in enumerate(shown)
        ]
    made: list = []
    engine.generate(requests, SamplingParams(TEMPERATURE, RESPONSE), made.append)
    return [
        {
            "id": c.sample.id,
            "prompt": c.sample.prompt.tolist(),
            "response": c.sample.response.tolist(),
            "logprobs": c.sample.fields["rollout_logprobs"].tolist(),
        }
        for c in sorted(made, key=lambda completion: completion.sample.id)
    ]
