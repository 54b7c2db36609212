"""Llama, Qwen2 and Qwen3: decoders with one attention and one gated feed-forward block a layer."""

from spmd_rl.weights.families.table import Row

_LAYER = "model.layers.{i}."

DENSE: tuple[Row, ...] = (
    Row(
        {"model.embed_tokens.weight": "vocabulary hidden"},
        megatron="embedding.word_embeddings.weight",
        vllm="model.embed_tokens.weight",
        cut="vocabulary",
        stage="first",
    ),
    Row(
        {_LAYER + "input_layernorm.weight": "hidden"},
        megatron="decoder.layers.{j}.input_layernorm.weight",
        vllm=_LAYER + "input_layernorm.weight",
        cut="whole",
    ),
    Row(
        {
            _LAYER + "self_attn.q_proj.weight": "q hidden",
            _LAYER + "self_attn.k_proj.weight": "kv hidden",
            _LAYER + "self_attn.v_proj.weight": "kv hidden",
        },
        megatron="decoder.layers.{j}.self_attention.linear_qkv.weight",
        vllm=_LAYER + "self_attn.qkv_proj.weight",
        cut="qkv",
    ),
    Row(
        {
            _LAYER + "self_attn.q_proj.bias": "q",
            _LAYER + "self_attn.k_proj.bias": "kv",
            _LAYER + "self_attn.v_proj.bias": "kv",
        },
        megatron="decoder.layers.{j}.self_attention.linear_qkv.bias",
        vllm=_LAYER + "self_attn.qkv_proj.bias",
        cut="qkv",
        when=lambda shape: shape.qkv_bias,
    ),
    Row(
        {_LAYER + "self_attn.q_norm.weight": "head"},
        megatron="decoder.layers.{j}.self_attention.q_layernorm.weight",
        vllm=_LAYER + "self_attn.q_norm.weight",
        cut="whole",
        when=lambda shape: shape.qk_norm,
    ),
    Row(
        {_LAYER + "self_attn.k_norm.weight": "head"},
        megatron="decoder.layers.{j}.self_attention.k_layernorm.weight",
        vllm=_LAYER + "self_attn.k_norm.weight",
        cut="whole",
        when=lambda shape: shape.qk_norm,
    ),
    Row(
        {_LAYER + "self_attn.o_proj.weight": "hidden q"},
        megatron="decoder.layers.{j}.self_attention.linear_proj.weight",
        vllm=_LAYER + "self_attn.o_proj.weight",
        cut="columns",
    ),
    Row(
        {_LAYER + "post_attention_layernorm.weight": "hidden"},
        megatron="decoder.layers.{j}.pre_mlp_layernorm.weight",
        vllm=_LAYER + "post_attention_layernorm.weight",
        cut="whole",
    ),
    Row(
        {_LAYER + "mlp.gate_proj.weight": "ffn hidden", _LAYER + "mlp.up_proj.weight": "ffn hidden"},
        megatron="decoder.layers.{j}.mlp.linear_fc1.weight",
        vllm=_LAYER + "mlp.gate_up_proj.weight",
        cut="gate_up",
    ),
    Row(
        {_LAYER + "mlp.down_proj.weight": "hidden ffn"},
        megatron="decoder.layers.{j}.mlp.linear_fc2.weight",
        vllm=_LAYER + "mlp.down_proj.weight",
        cut="columns",
    ),
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
        when=lambda shape: not shape.tied,
    ),
    # The last pipeline stage of a tied model keeps its own copy of the embedding, which the engine doesn't.
    Row(
        {"model.embed_tokens.weight": "vocabulary hidden"},
        megatron="output_layer.weight",
        vllm=None,
        cut="vocabulary",
        stage="last",
        when=lambda shape: shape.tied,
        copy=True,
    ),
)
