"""Llama, Qwen2 and Qwen3: decoders with one attention and one gated feed-forward block a layer."""

from spmd_rl.weights.families.decoder import ATTENTION, FEED_FORWARD, FIRST, LAST
from spmd_rl.weights.families.table import Row

DENSE: tuple[Row, ...] = (*FIRST, *ATTENTION, *FEED_FORWARD, *LAST)
