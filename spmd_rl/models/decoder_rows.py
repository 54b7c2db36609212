"""Name the rows that families have in common: embedding, norms, ordinary attention, gated feed-forward, heads."""

from collections.abc import Callable

from spmd_rl.models.weight_rows import Cut, Row, Sizes, always

LAYER = "model.layers.{i}."
TRAINED = "decoder.layers.{j}."
When = Callable[[Sizes, int], bool]


def layer_row(
    hf: dict[str, str], megatron: str | None, vllm: str | None, cut: Cut, when: When = always, experts: bool = False
) -> Row:
    """Return a row of a layer from its names inside the layer."""
    names = {LAYER + name: dims for name, dims in hf.items()}
    return Row(names, megatron and TRAINED + megatron, vllm and LAYER + vllm, cut, when=when, experts=experts)


def tensor_row(name: str, dims: str, megatron: str, cut: Cut = "whole", when: When = always) -> Row:
    """Return the row of one tensor of a layer, which vLLM calls as Hugging Face does."""
    return layer_row({name: dims}, megatron, name, cut, when)


def gated_rows(
    hf: str, ffn: str, megatron: str, gate_up: str, down: str, when: When, experts: bool = False
) -> tuple[Row, Row]:
    """Return the rows of a gated feed-forward block: `hf` and `megatron` begin its names, the others are vLLM's."""
    gate_and_up = {f"{hf}.{x}_proj.weight": f"{ffn} hidden" for x in ("gate", "up")}
    return (
        layer_row(gate_and_up, f"{megatron}.linear_fc1.weight", gate_up, "gate_up", when, experts),
        layer_row(
            {f"{hf}.down_proj.weight": f"hidden {ffn}"}, f"{megatron}.linear_fc2.weight", down, "columns", when, experts
        ),
    )


def dense_block(shape: Sizes, layer: int) -> bool:
    """Return whether the layer's feed-forward block is an ordinary one."""
    return shape.experts is None or not shape.experts.sparse[layer]


def sparse_block(shape: Sizes, layer: int) -> bool:
    """Return whether the layer's feed-forward block is one of experts."""
    return not dense_block(shape, layer)


def _has_shared(shape: Sizes, layer: int) -> bool:
    return sparse_block(shape, layer) and shape.experts is not None and shape.experts.shared_ffn > 0


_EMBEDDING = "model.embed_tokens.weight"
_VOCABULARY = "vocabulary hidden"
FIRST = (Row({_EMBEDDING: _VOCABULARY}, "embedding.word_embeddings.weight", _EMBEDDING, "vocabulary", "first"),)

NORM_BEFORE_ATTENTION = tensor_row("input_layernorm.weight", "hidden", "input_layernorm.weight")

ATTENTION = (
    NORM_BEFORE_ATTENTION,
    layer_row(
        {
            "self_attn.q_proj.weight": "q hidden",
            "self_attn.k_proj.weight": "kv hidden",
            "self_attn.v_proj.weight": "kv hidden",
        },
        "self_attention.linear_qkv.weight",
        "self_attn.qkv_proj.weight",
        "qkv",
    ),
    layer_row(
        {"self_attn.q_proj.bias": "q", "self_attn.k_proj.bias": "kv", "self_attn.v_proj.bias": "kv"},
        "self_attention.linear_qkv.bias",
        "self_attn.qkv_proj.bias",
        "qkv",
        lambda shape, layer: shape.qkv_bias,
    ),
    *(
        tensor_row(
            f"self_attn.{x}_norm.weight",
            "head",
            f"self_attention.{x}_layernorm.weight",
            when=lambda shape, layer: shape.qk_norm,
        )
        for x in "qk"
    ),
    tensor_row("self_attn.o_proj.weight", "hidden q", "self_attention.linear_proj.weight", "columns"),
)

FEED_FORWARD = (
    tensor_row("post_attention_layernorm.weight", "hidden", "pre_mlp_layernorm.weight"),
    *gated_rows("mlp", "ffn", "mlp", "mlp.gate_up_proj.weight", "mlp.down_proj.weight", dense_block),
)

# What is the same in all families of experts; shared experts differ in their names.
EXPERTS = (
    tensor_row("mlp.gate.weight", "experts hidden", "mlp.router.weight", when=sparse_block),
    *gated_rows(
        "mlp.experts.{e}",
        "expert_ffn",
        "mlp.experts",
        "mlp.experts.routed_experts.w13_weight",
        "mlp.experts.routed_experts.w2_weight",
        sparse_block,
        experts=True,
    ),
)


def shared_experts(name: str) -> tuple[Row, ...]:
    """Return the rows of the experts that every token passes, as one block; `name`: in Hugging Face and vLLM."""
    vllm = (f"mlp.{name}.gate_up_proj.weight", f"mlp.{name}.down_proj.weight")
    return gated_rows(f"mlp.{name}", "shared_ffn", "mlp.shared_experts", *vllm, _has_shared)


LAST = (
    Row({"model.norm.weight": "hidden"}, "decoder.final_layernorm.weight", "model.norm.weight", "whole", "last"),
    Row(
        {"lm_head.weight": _VOCABULARY},
        "output_layer.weight",
        "lm_head.weight",
        "vocabulary",
        "last",
        when=lambda shape, layer: shape.head == "lm" and not shape.tied,
    ),
    # The last pipeline stage of a tied model keeps its own copy of the embedding, which the engine doesn't.
    Row(
        {_EMBEDDING: _VOCABULARY},
        "output_layer.weight",
        None,
        "vocabulary",
        "last",
        when=lambda shape, layer: shape.head == "lm" and shape.tied,
        copy=True,
    ),
    Row(
        {"score.weight": "labels hidden"},
        "value_head.weight",
        None,
        "whole",
        "last",
        when=lambda shape, layer: shape.head == "value",
    ),
)

DENSE = (*FIRST, *ATTENTION, *FEED_FORWARD, *LAST)
"""Llama, Qwen2 and Qwen3: one attention and one gated feed-forward block a layer."""
