"""Shapes, numbered weights and shards cut in another way than the product does: what the weight tests compare with."""

import json
import math
from types import SimpleNamespace

import torch
from hypothesis import strategies as st

from spmd_rl.distributed.layout import RolloutLayout, TrainLayout
from spmd_rl.models import FAMILIES
from spmd_rl.models.blocks import Experts, LatentAttention, Vision
from spmd_rl.weights.families import hf_tensors
from spmd_rl.weights.transfer.boxes import Shard, view


def model_shape(**changes):
    """The fields of ModelShape that decide about weights, small."""
    fields = {
        "family": "qwen3",
        "layers": 2,
        "hidden": 8,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 4,
        "ffn": 12,
        "vocabulary": 19,
        "tied": False,
        "qkv_bias": False,
        "qk_norm": True,
        "experts": None,
        "mla": None,
        "vision": None,
        "head": "lm",
        "labels": 0,
    }
    return SimpleNamespace(**{**fields, **changes})


@st.composite
def models_and_layouts(draw, most_ranks=12):
    """A shape, and training (tensor, pipeline, data) and rollout (tensor) sizes that suit it."""
    tensor, pipeline, data = draw(
        st.tuples(st.sampled_from((1, 2, 3, 4)), st.integers(1, 3), st.integers(1, 3)).filter(
            lambda sizes: math.prod(sizes) <= most_ranks
        )
    )
    world = tensor * pipeline * data
    rollout = draw(st.sampled_from([n for n in (1, 2, 3, 4) if world % n == 0]))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8) if n % rollout == 0 or rollout % n == 0]))
    both = math.lcm(tensor, rollout)
    shape = model_shape(
        family=draw(st.sampled_from(("llama", "qwen2", "qwen3"))),
        layers=pipeline * draw(st.integers(1, 2)),
        hidden=draw(st.integers(1, 3)),
        heads=math.lcm(both, kv_heads) * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 3)),
        ffn=both * draw(st.integers(1, 3)),
        # vLLM pads to a multiple of 64, which has to divide by the ranks
        vocabulary=draw(st.integers(129, 192) if rollout == 3 else st.integers(1, 70)),
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )
    if (shape.heads + 2 * shape.kv_heads) % tensor:  # fewer groups than ranks: Megatron cuts through heads
        shape.head_dim *= tensor
    return shape, (tensor, pipeline, data), rollout


def divisors(number):
    """As hypothesis draws from them."""
    return st.sampled_from([n for n in range(1, number + 1) if number % n == 0])


@st.composite
def moves(draw, most_ranks=12):
    """A model of any family, and a training and a rollout layout of any kind that suit it."""
    tensor = draw(st.sampled_from((1, 2, 4)))
    context = draw(st.integers(1, max(1, min(2, most_ranks // tensor))))
    data = draw(st.integers(1, max(1, min(3, most_ranks // (tensor * context)))))
    stage = tensor * context * data
    pipeline = draw(st.integers(1, max(1, min(3, most_ranks // stage))))
    virtual = draw(st.integers(1, 2))
    chunks = pipeline * virtual
    layers = draw(st.lists(st.integers(1, 2), min_size=chunks, max_size=chunks))
    family = draw(st.sampled_from(sorted(FAMILIES)))
    sparse = family in ("qwen2_moe", "qwen3_moe", "deepseek_v3")
    expert = draw(divisors(stage)) if sparse else 1
    train = TrainLayout(
        *(tensor, pipeline, data, context, expert),
        expert_tensor=draw(divisors(stage // expert)) if sparse else 1,
        virtual=virtual,
        layers_per_stage=tuple(layers) if draw(st.booleans()) or len(set(layers)) > 1 else (),
    )
    engine = draw(divisors(train.world).filter(lambda n: n <= 4))
    rollout = RolloutLayout(
        engine,
        train.world,
        data=draw(divisors(train.world // engine)) if sparse else 1,
        expert=sparse and draw(st.booleans()),
    )
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4) if n % engine == 0 or engine % n == 0]))
    both = math.lcm(tensor, engine)
    mla = family == "deepseek_v3"
    small = st.integers(1, 3)
    shape = model_shape(
        family=family,
        layers=sum(layers),
        hidden=draw(small),
        heads=math.lcm(both, kv_heads),
        kv_heads=kv_heads,
        head_dim=draw(small),
        ffn=both * draw(st.integers(1, 2)),
        # vLLM pads to a multiple of 64, which has to divide by the ranks
        vocabulary=draw(st.integers(129, 192) if engine == 3 else st.integers(1, 70)),
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()) and not mla,
        qk_norm=draw(st.booleans()) and not mla,
        experts=draw(experts(train, rollout, sum(layers), family)) if sparse else None,
        mla=LatentAttention(draw(st.integers(0, 2)), draw(small), draw(small), draw(small), draw(small))
        if mla
        else None,
        vision=draw(visions(engine)) if family == "qwen2_5_vl" else None,
    )
    if mla:
        shape.kv_heads, shape.head_dim = shape.heads, shape.mla.nope_dim + shape.mla.rope_dim
    elif (shape.heads + 2 * shape.kv_heads) % tensor:  # fewer groups than ranks: Megatron cuts through heads
        shape.head_dim *= tensor
    return shape, train, rollout


@st.composite
def visions(draw, engine):
    """Vision towers that so many ranks of an engine can share."""
    heads, small = engine * draw(st.integers(1, 2)), st.integers(1, 2)
    sizes = {name: draw(small) for name in ("layers", "patch", "temporal", "channels", "merge")}
    tower = {"hidden": heads * draw(small), "heads": heads, "ffn": engine * draw(small)}
    return Vision(**sizes, **tower, image_token=3, config="{}")


@st.composite
def experts(draw, train, rollout, layers, family):
    """Experts that the layouts can share."""
    return Experts(
        count=math.lcm(train.expert, rollout.group if rollout.expert else 1) * draw(st.integers(1, 2)),
        per_token=1,
        ffn=math.lcm(train.expert_tensor, 1 if rollout.expert else rollout.group),
        shared_ffn=0 if family == "qwen3_moe" else math.lcm(train.tensor, rollout.tensor),
        shared_gate=family == "qwen2_moe",
        sparse=tuple(draw(st.booleans()) for _ in range(layers)),
        scores="sigmoid" if family == "deepseek_v3" else "softmax",
        normalized=True,
        bias=family == "deepseek_v3",
        groups=1,
        groups_per_token=1,
        scale=1.0,
    )


def numbered(shape, dtype=torch.float32):
    """Hugging Face tensors in which every element of the model has another value, none of them zero."""
    tensors, n = {}, 1
    for name, size in hf_tensors(shape).items():
        tensors[name] = torch.arange(n, n + math.prod(size)).reshape(size).to(dtype)
        n += math.prod(size)
    return tensors


def random_weights(shape, dtype=torch.float32, seed=0):
    """Hugging Face tensors with random values."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator).to(dtype) for name, size in hf_tensors(shape).items()}


def filled(shard: Shard, tensors):
    """The parameters of a shard, cut from Hugging Face tensors piece by piece."""
    dtype = next(iter(tensors.values())).dtype
    params = {name: torch.zeros(size, dtype=dtype) for name, size in shard.params.items()}
    for piece in shard.pieces:
        box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
        view(params[piece.param], piece.at, piece.shape).copy_(tensors[piece.tensor][box])
    return params


def copied_elements(plan):
    """Elements that a rank's plan copies on the rank."""
    return sum(source.elements for step in plan.rounds for source, _ in step.local)


def sent_elements(plan):
    """Elements that a rank's plan sends to other ranks."""
    return sum(piece.elements for step in plan.rounds for pieces in step.send.values() for piece in pieces)


def received_elements(plan):
    """Elements that a rank's plan receives from other ranks."""
    return sum(piece.elements for step in plan.rounds for pieces in step.receive.values() for piece in pieces)


def megatron_by_hand(shape, tensors, tensor, rank):
    """One rank's layer 0, embedding and head, from whole tensors (reshape, cat, chunk), for one pipeline stage."""
    d, groups = shape.head_dim, shape.kv_heads
    params = {}
    for kind in ["weight"] + ["bias"] * shape.qkv_bias:
        q, k, v = (tensors[f"model.layers.0.self_attn.{x}_proj.{kind}"] for x in "qkv")
        rest = q.shape[1:]
        parts = [q.view(groups, -1, *rest), k.view(groups, d, *rest), v.view(groups, d, *rest)]
        fused = torch.cat(parts, 1).reshape(-1, *rest)
        params[f"decoder.layers.0.self_attention.linear_qkv.{kind}"] = fused.chunk(tensor)[rank]
    mlp = "model.layers.0.mlp."
    gate_up = [tensors[f"{mlp}{x}_proj.weight"].chunk(tensor)[rank] for x in ("gate", "up")]
    params["decoder.layers.0.mlp.linear_fc1.weight"] = torch.cat(gate_up)
    params["decoder.layers.0.mlp.linear_fc2.weight"] = tensors[mlp + "down_proj.weight"].chunk(tensor, 1)[rank]
    out = tensors["model.layers.0.self_attn.o_proj.weight"]
    params["decoder.layers.0.self_attention.linear_proj.weight"] = out.chunk(tensor, 1)[rank]
    heads = {"embedding.word_embeddings.weight": "model.embed_tokens.weight"}
    if not shape.tied:
        heads["output_layer.weight"] = "lm_head.weight"
    for name, hf in heads.items():
        params[name] = pad_rows(tensors[hf], tensor).chunk(tensor)[rank]
    return params


def vllm_by_hand(shape, tensors, tensor, rank):
    """One rank's layer 0, embedding and head, the way vLLM's weight loaders cut them."""
    d = shape.head_dim
    params = {}
    replicas = max(1, tensor // shape.kv_heads)
    for kind in ["weight"] + ["bias"] * shape.qkv_bias:
        q, k, v = (tensors[f"model.layers.0.self_attn.{x}_proj.{kind}"] for x in "qkv")
        rows = max(1, shape.kv_heads // tensor) * d
        kv = [x[rank // replicas * rows :][:rows] for x in (k, v)]
        params[f"model.layers.0.self_attn.qkv_proj.{kind}"] = torch.cat([q.chunk(tensor)[rank], *kv])
    mlp = "model.layers.0.mlp."
    gate_up = [tensors[f"{mlp}{x}_proj.weight"].chunk(tensor)[rank] for x in ("gate", "up")]
    params[mlp + "gate_up_proj.weight"] = torch.cat(gate_up)
    params[mlp + "down_proj.weight"] = tensors[mlp + "down_proj.weight"].chunk(tensor, 1)[rank]
    for name in ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not shape.tied):
        params[name] = pad_rows(tensors[name], 64).chunk(tensor)[rank]
    return params


def pad_rows(tensor, multiple):
    """Zero rows below, up to a multiple."""
    return torch.nn.functional.pad(tensor, (0, 0, 0, -len(tensor) % multiple))


def save_directory(path, tensors, files=1, **config):
    """A Hugging Face directory with these tensors, in one file or spread over several."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "tiny", **config}))
    (path / "tokenizer.json").write_text("{}")
    (path / "generation_config.json").write_text('{"eos_token_id": 2}')
    names = list(tensors)
    if files == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    weight_map = {}
    for n in range(files):
        file = f"model-{n + 1:05d}-of-{files:05d}.safetensors"
        part = {name: tensors[name] for name in names[n::files]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path
