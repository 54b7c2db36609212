"""Name the rows that families have in common: embedding, norms, ordinary attention, gated feed-forward, heads."""

from spmd_rl.models.weight_rows import Row, Sizes

LAYER = "model.layers.{i}."
TRAINED = "decoder.layers.{j}."


def dense_block(shape: Sizes, layer: int) -> bool:
    """Return whether the layer's feed-forward block is an ordinary one."""
    return shape.experts is None or not shape.experts.sparse[layer]


def sparse_block(shape: Sizes, layer: int) -> bool:
    """Return whether the layer's feed-forward block is one of experts."""
    return not dense_block(shape, layer)


FIRST = (
    Row(
        {"model.embed_tokens.weight": "vocabulary hidden"},
        megatron="embedding.word_embeddings.weight",
        vllm="model.embed_tokens.weight",
        cut="vocabulary",
        stage="first",
    ),
)

NORM_BEFORE_ATTENTION = Row(
    {LAYER + "input_layernorm.weight": "hidden"},
    megatron=TRAINED + "input_layernorm.weight",
    vllm=LAYER + "input_layernorm.weight",
    cut="whole",
)

ATTENTION = (
    NORM_BEFORE_ATTENTION,
    Row(
        {
            LAYER + "self_attn.q_proj.weight": "q hidden",
            LAYER + "self_attn.k_proj.weight": "kv hidden",
            LAYER + "self_attn.v_proj.weight": "kv hidden",
        },
        megatron=TRAINED + "self_attention.linear_qkv.weight",
        vllm=LAYER + "self_attn.qkv_proj.weight",
        cut="qkv",
    ),
    Row(
        {
            LAYER + "self_attn.q_proj.bias": "q",
            LAYER + "self_attn.k_proj.bias": "kv",
            LAYER + "self_attn.v_proj.bias": "kv",
        },
        megatron=TRAINED + "self_attention.linear_qkv.bias",
        vllm=LAYER + "self_attn.qkv_proj.bias",
        cut="qkv",
        when=lambda shape, layer: shape.qkv_bias,
    ),
    *(
        Row(
            {LAYER + f"self_attn.{x}_norm.weight": "head"},
            megatron=TRAINED + f"self_attention.{x}_layernorm.weight",
            vllm=LAYER + f"self_attn.{x}_norm.weight",
            cut="whole",
            when=lambda shape, layer: shape.qk_norm,
        )
        for x in "qk"
    ),
    Row(
        {LAYER + "self_attn.o_proj.weight": "hidden q"},
        megatron=TRAINED + "self_attention.linear_proj.weight",
        vllm=LAYER + "self_attn.o_proj.weight",
        cut="columns",
    ),
)

FEED_FORWARD = (
    Row(
        {LAYER + "post_attention_layernorm.weight": "hidden"},
        megatron=TRAINED + "pre_mlp_layernorm.weight",
        vllm=LAYER + "post_attention_layernorm.weight",
        cut="whole",
    ),
    Row(
        {LAYER + "mlp.gate_proj.weight": "ffn hidden", LAYER + "mlp.up_proj.weight": "ffn hidden"},
        megatron=TRAINED + "mlp.linear_fc1.weight",
        vllm=LAYER + "mlp.gate_up_proj.weight",
        cut="gate_up",
        when=dense_block,
    ),
    Row(
        {LAYER + "mlp.down_proj.weight": "hidden ffn"},
        megatron=TRAINED + "mlp.linear_fc2.weight",
        vllm=LAYER + "mlp.down_proj.weight",
        cut="columns",
        when=dense_block,
    ),
)

# What is the same in all families of experts; shared experts differ in their names.
EXPERTS = (
    Row(
        {LAYER + "mlp.gate.weight": "experts hidden"},
        megatron=TRAINED + "mlp.router.weight",
        vllm=LAYER + "mlp.gate.weight",
        cut="whole",
        when=sparse_block,
    ),
    Row(
        {
            LAYER + "mlp.experts.{e}.gate_proj.weight": "expert_ffn hidden",
            LAYER + "mlp.experts.{e}.up_proj.weight": "expert_ffn hidden",
        },
        megatron=TRAINED + "mlp.experts.local_experts.{e}.linear_fc1.weight",
        vllm=LAYER + "mlp.experts.routed_experts.w13_weight",
        cut="gate_up",
        when=sparse_block,
        experts=True,
    ),
    Row(
        {LAYER + "mlp.experts.{e}.down_proj.weight": "hidden expert_ffn"},
        megatron=TRAINED + "mlp.experts.local_experts.{e}.linear_fc2.weight",
        vllm=LAYER + "mlp.experts.routed_experts.w2_weight",
        cut="columns",
        when=sparse_block,
        experts=True,
    ),
)


def shared_experts(name: str) -> tuple[Row, ...]:
    """Return the rows of the experts that every token passes, as one block; `name`: in Hugging Face and vLLM."""
    block = LAYER + f"mlp.{name}."
    return (
        Row(
            {block + "gate_proj.weight": "shared_ffn hidden", block + "up_proj.weight": "shared_ffn hidden"},
            megatron=TRAINED + "mlp.shared_experts.linear_fc1.weight",
            vllm=block + "gate_up_proj.weight",
            cut="gate_up",
            when=_has_shared,
        ),
        Row(
            {block + "down_proj.weight": "hidden shared_ffn"},
            megatron=TRAINED + "mlp.shared_experts.linear_fc2.weight",
            vllm=block + "down_proj.weight",
            cut="columns",
            when=_has_shared,
        ),
    )


def _has_shared(shape: Sizes, layer: int) -> bool:
    return sparse_block(shape, layer) and shape.experts is not None and shape.experts.shared_ffn > 0


LAST = (
    Row(
        {"model.norm.weight": "hidden"},
        megatron="decoder.final_layernorm.weight",
        vllm="model.norm.weight",
        cut="whole",
        stage="last",
    ),
    Row(
        {"lm_head.weight": "vocabulary hidden"},
        megatron="output_layer.weight",
        vllm="lm_head.weight",
        cut="vocabulary",
        stage="last",
        when=lambda shape, layer: shape.head == "lm" and not shape.tied,
    ),
    # The last pipeline stage of a tied model keeps its own copy of the embedding, which the engine doesn't.
    Row(
        {"model.embed_tokens.weight": "vocabulary hidden"},
        megatron="output_layer.weight",
        vllm=None,
        cut="vocabulary",
        stage="last",
        when=lambda shape, layer: shape.head == "lm" and shape.tied,
        copy=True,
    ),
    Row(
        {"score.weight": "labels hidden"},
        megatron="value_head.weight",
        vllm=None,
        cut="whole",
        stage="last",
        when=lambda shape, layer: shape.head == "value",
    ),
)

DENSE = (*FIRST, *ATTENTION, *FEED_FORWARD, *LAST)
"""Llama, Qwen2 and Qwen3: one attention and one gated feed-forward block a layer."""
