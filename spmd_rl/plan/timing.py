"""Estimate a step's seconds and tokens/s on a device, from what the other parts of the answer count."""

from dataclasses import asdict

from spmd_rl.estimate.step_time import Held, StepTime
from spmd_rl.estimate.work import Work
from spmd_rl.plan.case import Case, Json
from spmd_rl.platforms.devices import Device

ASSUMED = ("flops", "efficiency", "bandwidth", "decode", "layer_seconds", "link", "network", "host", "wire")


def timing(case: Case, device: Device, held: Held, work: Work | None = None) -> Json:
    """Return the seconds of each phase and tokens/s, in all and of a rank, as e2e_tps."""
    step = StepTime(case.run, device, held, case.ranks_per_node, work or Work.of(case.shape))
    seconds = step.seconds()
    tokens, whole = step.tokens(), sum(seconds.values())
    figures = {name: value for name, value in asdict(device).items() if name in ASSUMED}
    return {
        "device": device.name,
        "source": device.source,
        "figures": figures,
        "prompt_tokens": case.run.lengths.prompt,
        "response_tokens": case.run.lengths.response,
        "seconds": seconds,
        "step_seconds": whole,
        "tokens_per_second": tokens / whole,
        "e2e_tps": tokens / whole / case.world_size,
    }


def held_of(answer: Json) -> Held:
    """Return what phases move, from an answer that has the traffic and the memory of a case."""
    figures, parts = answer["figures"], answer["memory"]["estimate"]
    return Held(
        weights=figures["training_bytes"]["most"],
        engine=figures["engine_bytes"]["most"],
        cache=parts["rollout"]["parts"].get("cache", 0),
        optimizer=answer["memory"]["optimizer_bytes"],
        near=figures["received_same_node_bytes"]["most"],
        far=figures["received_other_nodes_bytes"]["most"],
    )
