"""Judge a plan for a device: does it fit, what would, how fast is it, what would be faster."""

from spmd_rl.plan.candidates import as_json, nearest, suggest
from spmd_rl.plan.case import Case, Json
from spmd_rl.plan.timing import held_of, timing


def judgement(case: Case, answer: Json, memory: int | None, wanted: bool) -> Json:
    """Return the estimated time of a step, whether it fits into `memory` bytes, and what would.

    `wanted`: also the layouts that fit, by their speed.
    """
    device = case.device
    assert device is not None
    found: Json = {"time": timing(case, device, held_of(answer)), "divides": divides(case)}
    if memory is None:
        return found
    room = int(memory * case.run.kernels.share)
    over = {phase: one["bytes"] for phase, one in answer["memory"]["estimate"].items() if one["bytes"] > room}
    found["fits"] = {"room": room, "does_not_fit": over}
    if over:
        found["fits"]["nearest"] = as_json(nearest(case, device, room))
    if wanted:
        found["suggested"] = as_json(suggest(case, device, room))
    return found


def divides(case: Case) -> list[str]:
    """Say what each size of the layouts has to divide, with the numbers."""
    shape, train, rollout = case.shape, case.train, case.rollout
    heads = f"{shape.heads} heads" + (f", {shape.kv_heads} of keys and values" if shape.kv_heads != shape.heads else "")
    chunks = [len(layers) for layers in train.chunk_layers(shape.layers)]
    said = [
        f"parallel.tensor {train.tensor} divides {heads}",
        f"parallel.pipeline {train.pipeline} parts {shape.layers} layers: {', '.join(map(str, chunks))}",
        f"tensor x context x pipeline = {train.tensor * train.context * train.pipeline} divides {case.world_size} "
        f"ranks: data {train.data}, which share the optimizer",
        f"rollout.tensor {rollout.tensor} divides {heads}, and {case.world_size} ranks: {rollout.replicas} engines",
    ]
    if shape.experts is not None:
        count, whole = shape.experts.count, train.stage_ranks // (train.expert * train.expert_tensor)
        said.append(
            f"parallel.expert {train.expert} divides {count} experts, and {train.stage_ranks} ranks of a stage: "
            f"each expert is on {whole}, which share its optimizer"
        )
        if rollout.expert:
            said.append(f"rollout.tensor x rollout.data = {rollout.group} divides {count} experts")
    return said
