"""Compute what one refresh of the engines' weights moves."""

import math
import re
import time
from collections import Counter
from pathlib import Path

from spmd_rl.config.check_critic import read_critic
from spmd_rl.config.engine_cache import BYTES
from spmd_rl.config.shipped import model_sizes
from spmd_rl.errors import ConfigError
from spmd_rl.models import FAMILIES
from spmd_rl.plan.case import Case, Json, cache_words, rollout_words, training_words
from spmd_rl.plan.refresh_stats import RankStats, refresh_stats
from spmd_rl.platforms import CLUSTER, record
from spmd_rl.weights.families import hf_tensors, megatron_shard, vllm_shard
from spmd_rl.weights.transfer.transfer_schedule import Schedule, bucket_of_bytes

LISTED = 5
"""Tensors in the list of those that move most."""
# (words in front of it in a table, name in the answer)
FIGURES = (
    ("held in training", "training_bytes"),
    ("  of the critic", "critic_bytes"),
    ("held by the engine", "engine_bytes"),
    ("copied on the rank", "copied_bytes"),
    ("received", "received_bytes"),
    ("  from the same node", "received_same_node_bytes"),
    ("  from other nodes", "received_other_nodes_bytes"),
    ("  in the fullest round", "received_fullest_round_bytes"),
    ("sent", "sent_bytes"),
    ("  to the same node", "sent_same_node_bytes"),
    ("  to other nodes", "sent_other_nodes_bytes"),
    ("  in the fullest round", "sent_fullest_round_bytes"),
)


def weights(case: Case, device: int | None = None) -> Json:
    """Return what one refresh moves, in figures that JSON can hold; sizes in bytes. Raises ValueError as a run does.

    `device`: bytes of a rank's; None: not said.
    """
    start = time.perf_counter()
    world, size = case.world_size, BYTES[case.config.model.dtype]
    sources = [megatron_shard(case.shape, case.train, rank) for rank in range(world)]
    destinations = [vllm_shard(case.shape, case.rollout, rank) for rank in range(world)]
    mib, machine = case.config.rollout.refresh_bucket_mib, case.config.run.platform
    # A plan is made elsewhere than where it will run: `auto` means a cluster.
    bucket_bytes = int(mib * 2**20) if mib else record(CLUSTER if machine == "auto" else machine).bucket_bytes
    schedule = Schedule(sources, destinations, case.ranks_per_node, bucket_of_bytes(bucket_bytes, size))
    ranks, tensors = refresh_stats(schedule)
    held = {id(shard): shard.elements * size for shard in (*sources, *destinations)}
    by_rank = [
        _figures(rank, one, held[id(sources[rank])], held[id(destinations[rank])], size) | {"critic_bytes": critic}
        for rank, (one, critic) in enumerate(zip(ranks, critic_bytes(case), strict=True))
    ]
    seconds = time.perf_counter() - start
    return {
        "model": {
            "path": case.config.model.path,
            "here": model_sizes(case.config.model.path) != Path(case.config.model.path),
            "family": case.shape.family,
            "parameters": sum(map(math.prod, hf_tensors(case.shape).values())),
            "dtype": case.config.model.dtype,
            **tower(case),
        },
        "ranks": world,
        "ranks_per_node": case.ranks_per_node,
        "fewest_ranks_taken": not case.world_size_given,
        "training": training_words(case),
        "rollout": rollout_words(case),
        "cache": cache_words(case, max(held[id(shard)] for shard in destinations), device),
        "rounds": schedule.rounds,
        "bucket_bytes": bucket_bytes,
        "planning_seconds": round(seconds, 3),
        "network_bytes": tensors.total() * size,
        "figures": {name: _spread([figures[name] for figures in by_rank]) for _, name in FIGURES},
        "peers": _spread([len(figures["peers"]) for figures in by_rank]),
        "largest_tensors": _most(tensors, size),
        "largest_kinds": _kinds(tensors, size),
        "by_rank": by_rank,
    }


def tower(case: Case) -> Json:
    """Return the parameters of a vision tower and its projector, and how many of them are frozen: the first refresh
    moves those, and no other. Nothing of a model of text."""
    family = FAMILIES[case.shape.family].vision
    if family is None or case.shape.vision is None:
        return {}
    sizes = {name: math.prod(size) for name, size in hf_tensors(case.shape).items() if family.part(name)}
    frozen = [size for name, size in sizes.items() if family.part(name) in case.config.model.freeze]
    return {"tower_layers": case.shape.vision.layers, "tower": sum(sizes.values()), "tower_frozen": sum(frozen)}


def critic_bytes(case: Case) -> list[int]:
    """Return the weights of PPO's critic on each rank; 0 where there is none, or its directory is not here."""
    try:
        critic = read_critic(case.config).shape if case.config.algorithm.uses_critic else None
    except ConfigError:  # it is among what a run would be refused for
        critic = None
    if critic is None or critic.layers < case.train.pipeline * case.train.virtual:
        return [0] * case.world_size
    layout, size = case.train.suited_to(critic.layers), BYTES[case.config.model.dtype]
    return [megatron_shard(critic, layout, rank).elements * size for rank in range(case.world_size)]


def _figures(rank: int, one: RankStats, training_bytes: int, engine_bytes: int, size: int) -> Json:
    return {
        "rank": rank,
        "training_bytes": training_bytes,
        "engine_bytes": engine_bytes,
        "copied_bytes": one.copied * size,
        "received_bytes": one.received * size,
        "received_same_node_bytes": one.received_near * size,
        "received_other_nodes_bytes": one.received_far * size,
        "received_fullest_round_bytes": one.fullest_receiving * size,
        "sent_bytes": one.sent * size,
        "sent_same_node_bytes": one.sent_near * size,
        "sent_other_nodes_bytes": one.sent_far * size,
        "sent_fullest_round_bytes": one.fullest_sending * size,
        "peers": [
            {"rank": peer, "received_bytes": one.received_from[peer] * size, "sent_bytes": one.sent_to[peer] * size}
            for peer in sorted(one.received_from.keys() | one.sent_to.keys())
        ],
    }


def _spread(values: list[int]) -> Json:
    most = max(values)
    return {"least": min(values), "mean": sum(values) / len(values), "most": most, "rank_of_most": values.index(most)}


def _most(tensors: Counter[str], size: int) -> list[Json]:
    return [{"tensor": name, "bytes": count * size} for name, count in _largest(tensors)]


def _kinds(tensors: Counter[str], size: int) -> list[Json]:
    """The same, of all layers and experts together."""
    totals: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    for name, count in tensors.items():
        kind = re.sub(r"\.\d+\.", ".*.", name)
        totals[kind] += count
        numbers[kind] += 1
    return [{"tensors": kind, "number": numbers[kind], "bytes": count * size} for kind, count in _largest(totals)]


def _largest(counts: Counter[str]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:LISTED]


def place(case: Case, rank: int) -> Json:
    """Describe a rank's coordinates in both layouts."""
    at = case.train.coords(rank)
    places = {"pipeline": at.pipeline, "data": at.data, "tensor": at.tensor}
    if case.shape.experts:
        places |= {"expert": at.expert, "expert_tensor": at.expert_tensor}
    return {
        "node": rank // case.ranks_per_node,
        "training_place": places,
        "rollout_place": {"engine": case.rollout.replica(rank), "tensor": case.rollout.tensor_rank(rank)},
    }
