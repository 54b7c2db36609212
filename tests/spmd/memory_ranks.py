"""One rank of tests/spmd/test_estimate.py: the allocations of torch in an update, counted by its profiler."""

import dataclasses
import gc
import json
import tempfile

from spmd.ranks import arguments, end_megatron, join, ready, report


def main() -> None:
    platform = ready("megatron_core")
    world = join(platform)
    found = []
    for case in arguments()["cases"]:
        found.append(_case(case, world))
        end_megatron()
        gc.collect()
    report(world.rank, {"peaks": found})


def _case(case: dict, world) -> int:
    import torch

    from spmd_rl.config.config import Config, ModelConfig
    from spmd_rl.distributed.sample import Sample
    from spmd_rl.models.model_shape import read_model_shape
    from spmd_rl.worker.trainer import Trainer

    shape, draw = read_model_shape(case["model"]), torch.Generator().manual_seed(0)
    base = Config(ModelConfig(case["model"], dtype="float32"))
    config = dataclasses.replace(
        base,
        parallel=dataclasses.replace(base.parallel, **case["parallel"]),
        train=dataclasses.replace(base.train, **case.get("train", {})),
    )
    trainer = Trainer(config, shape, torch.device("cpu"), world)
    prompt, response, batches, number = case["prompt"], case["response"], [], 0
    for _ in range(case["microbatches"]):
        start, samples = torch.randint(3, shape.vocabulary, (prompt,), generator=draw), []
        for _ in range(case["samples"]):
            tokens = torch.cat([start, torch.randint(3, shape.vocabulary, (response,), generator=draw)])
            fields = {name: torch.full((response,), -3.0) for name in ("policy_logprobs", "rollout_logprobs")}
            fields |= {name: torch.full((response,), 1e-3) for name in ("advantages", "weights")}
            samples.append(Sample(number, tokens, prompt, torch.ones(response, dtype=torch.bool), fields))
            number += 1
        batches.append([samples])
    trainer.packs = [trainer.pack(batches, True)]
    # The first update makes the optimizer's moments.
    trainer.learn("policy", 0, 1e-4)
    return peak_of(lambda: trainer.learn("policy", 0, 1e-4))


def peak_of(act) -> int:
    """The most that is allocated at once, inside of `act`."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        act()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiled.export_chrome_trace(file.name)
        events = json.load(open(file.name))["traceEvents"]
    moves = sorted((one for one in events if one.get("name") == "[memory]"), key=lambda one: one["ts"])
    return most_at_once([(move["args"]["Addr"], move["args"]["Bytes"]) for move in moves])


def most_at_once(moves: list[tuple[int, int]]) -> int:
    """What gloo's threads free is not seen: its address is given out again, and what was there is no more."""
    held, level, most = {}, 0, 0
    for address, size in moves:
        level -= held.pop(address, 0)
        if size > 0:
            held[address] = size
            level += size
        most = max(most, level)
    return most
