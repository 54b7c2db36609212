"""Hold one row of a family's table: a parameter's names in the three spellings, its dimensions and its cut."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from spmd_rl.models.blocks import Experts, LatentAttention, Vision

Cut = Literal["whole", "rows", "columns", "vocabulary", "qkv", "gate_up", "thirds"]


class Sizes(Protocol):
    """Name what the rows read of a ModelShape."""

    @property
    def family(self) -> str: ...
    @property
    def layers(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def experts(self) -> Experts | None: ...
    @property
    def mla(self) -> LatentAttention | None: ...
    @property
    def vision(self) -> Vision | None: ...
    @property
    def head(self) -> str: ...
    @property
    def labels(self) -> int: ...


def always(shape: Sizes, layer: int) -> bool:
    """Return True: every layer of every model of the family has the row."""
    return True


@dataclass(frozen=True)
class Row:
    """Hold one parameter: the Hugging Face tensors in it, and its name and cut in a shard.

    `hf` maps a name to its dimensions, by name (see `dimensions`). In names, `{i}` is the layer (of the vision tower,
    for `stage` tower: the first pipeline stage holds it), `{j}` the layer
    counted from the first one of the model chunk that trains it, `{e}` the expert. `stage`: the pipeline stage that
    holds it. `megatron` or `vllm` None: that side has no parameter of its own (or has the tensors in another row).
    `when`: whether a layer of a model has the row. `copy`: a second copy of a tensor, which a stage holds only when
    another stage holds the first. `experts`: there is one for each expert; a rank has those of its experts in one
    parameter, stacked along a leading dimension.
    """

    hf: dict[str, str]
    megatron: str | None
    vllm: str | None
    cut: Cut
    stage: Literal["first", "tower", "layer", "last"] = "layer"
    when: Callable[[Sizes, int], bool] = always
    copy: bool = False
    experts: bool = False


def dimensions(shape: Sizes) -> dict[str, int]:
    """Return the lengths that rows call by name."""
    lengths = {
        "one": 1,
        "hidden": shape.hidden,
        "head": shape.head_dim,
        "q": shape.heads * shape.head_dim,
        "kv": shape.kv_heads * shape.head_dim,
        "ffn": shape.ffn,
        "vocabulary": shape.vocabulary,
        "labels": shape.labels,
    }
    if shape.experts is not None:
        lengths |= {
            "experts": shape.experts.count,
            "expert_ffn": shape.experts.ffn,
            "shared_ffn": shape.experts.shared_ffn,
        }
    if shape.mla is not None:
        mla = shape.mla
        lengths |= {
            "q_rank": mla.q_rank,
            "kv_rank": mla.kv_rank,
            "kv_down": mla.kv_rank + mla.rope_dim,
            "kv_up": shape.heads * (mla.nope_dim + mla.v_dim),
            "v": shape.heads * mla.v_dim,
        }
    if shape.vision is not None:
        vision = shape.vision
        lengths |= {
            "vision": vision.hidden,
            "vision_qkv": 3 * vision.hidden,
            "vision_ffn": vision.ffn,
            "merged": vision.merged,
            "channels": vision.channels,
            "temporal": vision.temporal,
            "patch": vision.patch,
        }
    return lengths
