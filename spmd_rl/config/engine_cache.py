"""Size an engine's key-value cache: what a token takes, how many samples fit, what more would be of no use."""

import math
from dataclasses import dataclass

from spmd_rl.config.config import Config
from spmd_rl.models.model_shape import ModelShape

BYTES = {"float32": 4, "bfloat16": 2}
GIB = 2**30
REST_BYTES = 4 * GIB
"""Of a device, for what is neither weights nor cache: activations, graphs, buffers of the ranks' messages."""
HOST_SHARE = 0.2
"""Of a machine's free memory, for the caches of the engines on its CPUs."""
_SLACK = 1.02
"""Over the blocks of whole samples: vLLM keeps some for itself."""


def token_bytes(model: ModelShape, tensor: int, dtype: str) -> int:
    """Return what a token takes in the cache of a rank, of `tensor` that share an engine."""
    if model.mla is not None:  # one latent vector for keys and values, the same on all ranks
        values = model.mla.kv_rank + model.mla.rope_dim
    else:
        values = 2 * max(1, model.kv_heads // tensor) * model.head_dim
    return model.layers * values * BYTES[dtype]


@dataclass(frozen=True)
class CacheNeed:
    """Hold what an engine would make use of."""

    token_bytes: int
    longest: int
    """Tokens of a sample, at most."""
    at_once: int
    """Samples that the engine may run at once."""
    of_replica: int
    """Samples of a step that the engine makes."""
    block_tokens: int

    @classmethod
    def of(cls, config: Config, model: ModelShape, world_size: int) -> "CacheNeed":
        """Return it for the engines of a run."""
        rollout, train = config.rollout, config.train
        replicas = max(1, world_size // rollout.tensor)
        samples = -(-train.prompts_per_step // replicas) * config.algorithm.samples_per_prompt
        return cls(
            token_bytes(model, rollout.tensor, config.model.dtype),
            config.data.max_prompt_length + config.longest_response,
            rollout.max_sequences or samples,
            samples,
            rollout.block_tokens,
        )

    @property
    def sample_bytes(self) -> int:
        """Return what the longest sample takes, in whole blocks."""
        return -(-self.longest // self.block_tokens) * self.block_tokens * self.token_bytes

    @property
    def useful_bytes(self) -> int:
        """Return what all samples that run at once take: more is of no use."""
        return math.ceil(self.at_once * self.sample_bytes * _SLACK) + 2 * self.block_tokens * self.token_bytes

    def described(self, cache_bytes: float) -> str:
        """Say how many samples a cache holds, and, where it makes an engine wait, that it does."""
        fit, wanted = int(cache_bytes // self.sample_bytes), min(self.at_once, self.of_replica)
        held = f"key-value cache: {_size(cache_bytes)} a rank, room for {fit} samples of {self.longest} tokens at once"
        if fit >= wanted:
            return f"{held}; an engine makes {self.of_replica} in a step"
        return (
            f"{held}, fewer than the {wanted} that an engine could run of its {self.of_replica}: the others wait. "
            f"{_size(wanted * self.sample_bytes)} would hold them (rollout.cache_gib, rollout.memory_fraction)"
        )


def _size(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.2f} MiB"


def cache_room(free: int, total: int | None, weights: int, fraction: float | None, ranks_of_node: int) -> float:
    """Return the bytes that a cache may take, of memory that is free now.

    `total`: the device's; None: a CPU, whose machine `ranks_of_node` engines share. `weights`: the engine's, of this
    rank. `fraction`: rollout.memory_fraction.
    """
    if total is None:
        return free * (fraction or HOST_SHARE) / ranks_of_node
    return (total * fraction if fraction else free - REST_BYTES) - weights
