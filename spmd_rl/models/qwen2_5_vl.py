"""Qwen2.5-VL: the decoder of Qwen2, whose positions are threefold, behind a vision tower with windows."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from spmd_rl.models.blocks import Vision
from spmd_rl.models.decoder_rows import DENSE
from spmd_rl.models.decoder_shape import decoder_shape, plain_refusals
from spmd_rl.models.family import Content, Family, Grid, Positions, Refusal, VisionFamily
from spmd_rl.models.weight_rows import Cut, Row

_TOWER = "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VisionTransformerPretrainedModel"


def _text(content: Content) -> Content:
    """Return what config.json says of the decoder: beside the rest before transformers 5, in a part of its own since.

    The rotary scaling `mrope` is only the section: which frequencies turn with which of the three positions.
    """
    part = dict(content.get("text_config") or {})
    found = {
        **content,
        **part,
        "tie_word_embeddings": content.get("tie_word_embeddings") or part.get("tie_word_embeddings"),
    }
    for key in ("rope_parameters", "rope_scaling"):
        said = dict(found.get(key) or {})
        if said.get("rope_type", said.get("type")) in ("mrope", "default", None):
            found[key] = {name: said[name] for name in ("rope_theta",) if name in said} or None
    return found


def _sections(content: Content) -> list[int]:
    """Return how many frequencies turn with time, height and width. Raises KeyError where config.json lacks them."""
    part = {**content, **(content.get("text_config") or {})}
    said = part.get("rope_parameters") or part.get("rope_scaling") or {}
    return [int(count) for count in said["mrope_section"]]


def _shape(content: Content) -> dict[str, Any]:
    found, vision = decoder_shape(_text(content)), content["vision_config"]
    tower = Vision(
        layers=int(vision.get("depth", 32)),
        hidden=int(vision["hidden_size"]),
        heads=int(vision.get("num_heads", 16)),
        ffn=int(vision["intermediate_size"]),
        patch=int(vision.get("patch_size", 14)),
        temporal=int(vision.get("temporal_patch_size", 2)),
        channels=int(vision.get("in_channels", vision.get("in_chans", 3))),
        merge=int(vision.get("spatial_merge_size", 2)),
        image_token=int(content["image_token_id"]),
        config=json.dumps(vision, sort_keys=True),
    )
    axes = tuple(axis for axis, count in enumerate(_sections(content)) for _ in range(count))
    return found | {"qkv_bias": True, "vision": tower, "rope_axes": axes}


def _refuses(content: Content) -> list[Refusal]:
    text, vision, sections = _text(content), content["vision_config"], _sections(content)
    refused = plain_refusals(text)
    sizes = decoder_shape(text)
    if vision.get("hidden_act", "silu") != "silu":
        refused.append((f"hidden_act of its vision tower is {vision['hidden_act']}", "supported is silu"))
    if vision.get("out_hidden_size") != sizes["hidden"]:
        met = f"its vision tower gives {vision.get('out_hidden_size')} channels, its decoder takes {sizes['hidden']}"
        refused.append((met, "copy the model's directory again"))
    if 2 * sum(sections) != sizes["head_dim"]:
        met = f"mrope_section {sections} are {sum(sections)} frequencies, a head has {sizes['head_dim'] // 2}"
        refused.append((met, "copy the model's directory again"))
    return refused


def positions(token_ids: Sequence[int], grids: Sequence[Grid], vision: Vision) -> Positions:
    """Return the rotary positions of a prompt: text counts on in all three, an image spans its rows and columns.

    The text after an image begins behind its longest side. (As transformers' get_rope_index for images.) Raises
    ValueError where the image tokens are not those of the grids.
    """
    axes: Positions = ([], [], [])
    at, begins, left = 0, 0, iter(grids)
    while at < len(token_ids):
        if token_ids[at] != vision.image_token:
            for axis in axes:
                axis.append(begins)
            at, begins = at + 1, begins + 1
            continue
        frames, rows, columns = next(left, (0, 0, 0))
        rows, columns = rows // vision.merge, columns // vision.merge
        count = frames * rows * columns
        if not count or any(token != vision.image_token for token in token_ids[at : at + count]):
            raise ValueError(f"the image tokens from token {at} are not those of the images' grids {list(grids)}")
        for time in range(frames):
            for row in range(rows):
                axes[0].extend([begins + time] * columns)
                axes[1].extend([begins + row] * columns)
                axes[2].extend(range(begins, begins + columns))
        at, begins = at + count, begins + max(rows, columns)
    if next(left, None) is not None or any(len(axis) != len(token_ids) for axis in axes):
        raise ValueError(f"the image tokens of the prompt are not those of the images' grids {list(grids)}")
    return axes


def _tower_rows(hf: dict[str, str], vllm: str, cut: Cut, layer: bool = True) -> Iterator[Row]:
    """Yield the rows of one vLLM parameter: a training rank holds each of its tensors, whole, as transformers does."""
    where, stage = ("visual.blocks.{i}.", "tower") if layer else ("visual.merger.", "first")
    named = {where + name: dims for name, dims in hf.items()}
    if cut == "whole":
        assert list(named) == [where + vllm]
        yield Row(named, where + vllm, where + vllm, cut, stage)  # type: ignore[arg-type]
        return
    for name, dims in named.items():
        yield Row({name: dims}, name, None, "whole", stage)  # type: ignore[arg-type]
    yield Row(named, None, where + vllm, cut, stage)  # type: ignore[arg-type]


def _rows() -> Iterator[Row]:
    patches = "visual.patch_embed.proj.weight"
    yield Row({patches: "vision channels temporal patch patch"}, patches, patches, "whole", "first")
    for name in ("norm1.weight", "norm2.weight", "attn.proj.bias", "mlp.down_proj.bias"):
        yield from _tower_rows({name: "vision"}, name, "whole")
    for kind, columns in (("weight", " vision"), ("bias", "")):
        yield from _tower_rows({f"attn.qkv.{kind}": "vision_qkv" + columns}, f"attn.qkv.{kind}", "thirds")
        halves = {f"mlp.{half}_proj.{kind}": "vision_ffn" + columns for half in ("gate", "up")}
        yield from _tower_rows(halves, f"mlp.gate_up_proj.{kind}", "gate_up")
    yield from _tower_rows({"attn.proj.weight": "vision vision"}, "attn.proj.weight", "columns")
    yield from _tower_rows({"mlp.down_proj.weight": "vision vision_ffn"}, "mlp.down_proj.weight", "columns")
    projector: tuple[tuple[str, str, Cut], ...] = (
        ("ln_q.weight", "vision", "whole"),
        ("mlp.0.weight", "merged merged", "rows"),
        ("mlp.0.bias", "merged", "rows"),
        ("mlp.2.weight", "hidden merged", "columns"),
        ("mlp.2.bias", "hidden", "whole"),
    )
    for name, dims, cut in projector:
        yield from _tower_rows({name: dims}, name, cut, layer=False)
    yield from (replace(row, vllm=row.vllm and f"language_model.{row.vllm}") for row in DENSE)


QWEN2_5_VL = Family(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    tuple(_rows()),
    _shape,
    _refuses,
    scores=False,
    vision=VisionFamily(_TOWER, positions),
    spellings=(("model.language_model.", "model."), ("model.visual.", "visual.")),
)
