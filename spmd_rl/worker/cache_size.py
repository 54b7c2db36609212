"""Decide how large the key-value cache of a rank's engine is."""

from spmd_rl.config.config import Config
from spmd_rl.config.engine_cache import GIB, CacheNeed, cache_room
from spmd_rl.distributed.gather import gather
from spmd_rl.distributed.world import World
from spmd_rl.errors import ConfigError, Problem
from spmd_rl.platforms.platform import Platform, free_host_bytes


def cache_bytes(config: Config, need: CacheNeed, platform: Platform, world: World, weights: int) -> int:
    """Return the bytes of the cache, the same on all ranks: of what is free, as the settings say. A collective.

    `weights`: bytes of the engine's weights on this rank. Raises ConfigError where not one sample would fit.
    """
    rollout = config.rollout
    if rollout.cache_gib is not None:
        return int(rollout.cache_gib * GIB)
    device = platform.free_and_total_bytes
    free, total = device() if device is not None else (free_host_bytes(), None)
    room = cache_room(free, total, weights, rollout.memory_fraction, world.ranks_per_node)
    if rollout.memory_fraction is None:
        room = min(room, need.useful_bytes)
    # The ranks of an engine must count the same blocks.
    room = min(gather(room, world.payload))
    if room < need.sample_bytes:
        name = "cache_gib" if rollout.memory_fraction is None else "memory_fraction"
        where = "of the machine's memory" if total is None else f"of the device's {total / GIB:.2f} GiB"
        met = (
            f"one sample of {need.longest} tokens takes {need.sample_bytes / GIB:.3f} GiB per rank, the cache would "
            f"have {max(0.0, room) / GIB:.3f}: {free / GIB:.2f} GiB {where} are free, weights take {weights / GIB:.2f}"
        )
        way = "shorter samples, a larger rollout.tensor, or end what else holds memory"
        raise ConfigError(Problem(f"rollout.{name}", getattr(rollout, name), met, way))
    return int(room)
