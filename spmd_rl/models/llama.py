"""Llama: the plainest decoder."""

from spmd_rl.models.decoder_rows import DENSE
from spmd_rl.models.decoder_shape import decoder_shape, plain_refusals
from spmd_rl.models.family import Family

LLAMA = Family("llama", "LlamaForCausalLM", DENSE, decoder_shape, plain_refusals)
