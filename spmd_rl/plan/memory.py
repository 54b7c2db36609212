"""Say what each rank holds, phase by phase: the models exactly, the rest as an estimate."""

from collections.abc import Mapping
from dataclasses import replace

from spmd_rl.errors import refuse
from spmd_rl.estimate.rank_memory import parts_by_phase
from spmd_rl.plan.case import Case, Json, cache_bytes
from spmd_rl.rollout.options import memory_of_engine
from spmd_rl.weights.device_memory import RankBytes, memory_problems, rank_bytes


def memory(case: Case, buckets: list[int], device: int | None) -> Json:
    """Return the bytes of each phase over all ranks, in figures that JSON can hold.

    `buckets`: what each rank holds of a refresh's messages at once. `device`: bytes of one; None: not known. Raises
    ConfigError, in the words of a run, where the models don't fit.
    """
    alike: dict[tuple[object, ...], RankBytes] = {}
    by_rank: dict[int, RankBytes] = {}
    for rank in range(case.world_size):
        at = case.train.coords(rank)
        place = at.pipeline, at.tensor, at.expert, at.expert_tensor, case.rollout.group_rank(rank), buckets[rank]
        if place not in alike:
            held = rank_bytes(case.config, case.shape, case.train, case.rollout, rank, buckets[rank])
            alike[place] = _with_cache(held, device, case)
        by_rank[rank] = alike[place]
    if device is not None:
        refuse(memory_problems(case.config, by_rank, device))
    phases = {rank: held.phases() for rank, held in by_rank.items()}
    spread = {}
    for phase in phases[0]:
        sizes = [one[phase] for one in phases.values()]
        spread[phase] = {"least": min(sizes), "most": max(sizes), "rank_of_most": sizes.index(max(sizes))}
        if device is not None:
            spread[phase]["margin"] = device - max(sizes)
    estimate = fullest(case, by_rank)
    peak = max(estimate, key=lambda phase: estimate[phase]["bytes"])
    return {
        "device_bytes": device,
        "cache_left_to_the_device": case.config.rollout.cache_gib is None,
        "phases": spread,
        "estimate": estimate,
        "peak": {"phase": peak, **estimate[peak]},
        "optimizer_bytes": max(held.learners["policy"].optimizer for held in by_rank.values()),
    }


def fullest(case: Case, by_rank: Mapping[int, RankBytes]) -> Json:
    """Return of each phase the rank that holds most, all parts counted, and what it holds."""
    run, found = case.run, dict[str, Json]()
    # Ranks of a stage that hold equally much are counted once: the first.
    first = {(case.train.coords(rank).pipeline, id(held)): rank for rank, held in reversed(by_rank.items())}
    for (stage, _), rank in sorted(first.items(), key=lambda item: item[1]):
        for phase, parts in parts_by_phase(run, by_rank[rank], stage).items():
            size = sum(parts.values())
            if phase not in found or size > found[phase]["bytes"]:
                found[phase] = {"bytes": size, "rank": rank, "parts": parts}
    return found


def _with_cache(held: RankBytes, device: int | None, case: Case) -> RankBytes:
    if device is None:
        return held
    # Refuses an engine that does not fit.
    _, cache = memory_of_engine(device, device, held.engine, int(cache_bytes(case, held.engine, device) or 0) or None)
    return replace(held, cache=cache)
