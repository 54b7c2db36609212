"""Know a model from its config.json: one file a family, and this table of them. Nothing here imports torch."""

from spmd_rl.models.deepseek_v3 import DEEPSEEK_V3
from spmd_rl.models.family import Family
from spmd_rl.models.llama import LLAMA
from spmd_rl.models.qwen2 import QWEN2
from spmd_rl.models.qwen2_5_vl import QWEN2_5_VL
from spmd_rl.models.qwen2_moe import QWEN2_MOE
from spmd_rl.models.qwen3 import QWEN3
from spmd_rl.models.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {
    family.name: family for family in (LLAMA, QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE, DEEPSEEK_V3, QWEN2_5_VL)
}
CAUSAL_LM = {family.causal_lm: family for family in FAMILIES.values()}
"""Architecture in config.json -> family, of models that write."""
SEQUENCE_CLASSIFICATION = {
    family.sequence_classification: family for family in FAMILIES.values() if family.sequence_classification
}
"""The same, of models that score."""
_SPELLINGS = tuple(pair for family in FAMILIES.values() for pair in family.spellings)


def usual_name(tensor: str) -> str:
    """Return a tensor's name as the rows of its family have it; some directories begin it in another way."""
    for other, usual in _SPELLINGS:
        if tensor.startswith(other):
            return usual + tensor[len(other) :]
    return tensor
