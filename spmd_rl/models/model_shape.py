"""Read what a model's config.json says of its size: all that layouts, memory and checks need, loading nothing."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from spmd_rl.errors import ConfigError, Problem, refuse
from spmd_rl.models import CAUSAL_LM, FAMILIES, SEQUENCE_CLASSIFICATION
from spmd_rl.models.blocks import Experts, LatentAttention, Vision

_AGAIN = "copy the model's directory again"
_TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class ModelShape:
    architecture: str
    """As in config.json, e.g. LlamaForCausalLM."""
    model_type: str
    family: str
    """A key of FAMILIES."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    """Not always hidden / heads."""
    ffn: int
    vocabulary: int
    tied: bool
    """The output layer is the embedding."""
    qkv_bias: bool
    qk_norm: bool
    rms_epsilon: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    """As transformers 5 writes it, with "rope_type", without "rope_theta". None: plain rotary positions."""
    max_positions: int
    eos_token_ids: tuple[int, ...]
    """Tokens that end a response, of config.json and generation_config.json together."""
    experts: Experts | None = None
    """None: a dense model."""
    mla: LatentAttention | None = None
    """None: ordinary attention."""
    vision: Vision | None = None
    """None: a model of text alone."""
    rope_axes: tuple[int, ...] = ()
    """Of each rotary frequency, the position that turns it: 0 time, 1 height, 2 width. Empty: there is one position."""
    head: Literal["lm", "value"] = "lm"
    """value: a score head (`score.weight`) of `labels` rows in place of the language-model head."""
    labels: int = 0

    def is_sparse(self, layer: int) -> bool:
        """Return True where the feed-forward block of a layer is one of experts."""
        return self.experts is not None and self.experts.sparse[layer]


def read_model_shape(
    path: str | Path, knob: str = "model.path", head: Literal["lm", "value"] | None = None
) -> ModelShape:
    """Return the shape of the model in a Hugging Face directory; ConfigError says what is wrong with it.

    `knob`: the setting that names it. `head`: the only one that will do; None: either.
    """
    file = Path(path) / "config.json"
    content = _read_json(path, file, knob)
    architectures = content.get("architectures") or []
    architecture = architectures[0] if architectures else None
    known = SEQUENCE_CLASSIFICATION if head == "value" else CAUSAL_LM | SEQUENCE_CLASSIFICATION
    if architecture not in known:
        raise ConfigError(_unsupported(path, knob, architecture, head))
    family, scores = known[architecture], architecture in SEQUENCE_CLASSIFICATION
    try:
        sizes = family.shape(content)
        shape = ModelShape(
            architecture=architecture,
            model_type=str(content.get("model_type", family.name)),
            family=family.name,
            eos_token_ids=_eos_token_ids(path, content, knob),
            head="value" if scores else "lm",
            labels=int(content.get("num_labels") or len(content.get("id2label") or {}) or 2) if scores else 0,
            **sizes | {"tied": sizes["tied"] and not scores},
        )
        refused = family.refuses(content)
    except ConfigError:
        raise
    except KeyError as error:
        raise ConfigError(Problem(knob, path, f"{file} has no {error}", _AGAIN)) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(Problem(knob, path, f"{file} cannot be understood: {error}", _AGAIN)) from error
    refuse([Problem(knob, path, met, way) for met, way in refused])
    return shape


def with_value_head(shape: ModelShape, labels: int = 1) -> ModelShape | None:
    """Return the shape of a model that writes with a score head in place of its head; None: its family has none."""
    architecture = FAMILIES[shape.family].sequence_classification
    if architecture is None:
        return None
    return replace(shape, architecture=architecture, head="value", labels=labels, tied=False)


def _unsupported(path: str | Path, knob: str, architecture: str | None, head: str | None) -> Problem:
    met = f"the architecture in its config.json is {architecture}"
    if head == "value":
        way = (
            f"a reward model is one of {', '.join(SEQUENCE_CLASSIFICATION)}. A model that writes becomes one by "
            "training: tools/convert_checkpoint.py --head value gives it a score head to start from"
        )
        return Problem(knob, path, f"{met}, which is not one that scores", way)
    way = f"supported are {', '.join(CAUSAL_LM)}, and the first ones as ...ForSequenceClassification"
    return Problem(knob, path, met, way)


def _eos_token_ids(path: str | Path, content: dict[str, Any], knob: str) -> tuple[int, ...]:
    file = Path(path) / "generation_config.json"
    generation = _read_json(path, file, knob) if file.is_file() else {}
    ids: list[int] = []
    text = content.get("text_config") or {}
    for value in (content.get("eos_token_id", text.get("eos_token_id")), generation.get("eos_token_id")):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))


def foreign_checkpoint(path: str | Path, knob: str) -> Problem | None:
    """Return what to do with a checkpoint of Megatron's old format, as MindSpeed-RL has them; None: it is none."""
    if not (Path(path) / _TRACKER).is_file():
        return None
    met = f"a checkpoint of Megatron's old format ({_TRACKER}), which is cut for one layout and is not read"
    way = "name the Hugging Face directory that it was converted from, or convert it back with the tool that made it"
    return Problem(knob, path, met, way)


def _read_json(path: str | Path, file: Path, knob: str) -> dict[str, Any]:
    if not Path(path).is_dir():
        way = "name a Hugging Face model directory"
        if str(path).startswith("~"):
            way = f"only a shell knows ~: write {Path(path).expanduser()}"
        raise ConfigError(Problem(knob, path, "there is no such directory", way))
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if foreign := foreign_checkpoint(path, knob):
            raise ConfigError(foreign) from None
        way = "is it a Hugging Face directory?"
        raise ConfigError(Problem(knob, path, f"there is no {file.name} in it", way)) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(Problem(knob, path, f"{file.name} is not valid JSON: {error}", _AGAIN)) from error
    if not isinstance(content, dict):
        raise ConfigError(Problem(knob, path, f"{file.name} holds {type(content).__name__}, not an object", _AGAIN))
    return content
