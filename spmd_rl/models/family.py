"""Describe a model family in one record: its architectures, what its config.json means, and its weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spmd_rl.models.blocks import Vision
from spmd_rl.models.weight_rows import Row

Content = Mapping[str, Any]
"""Of a config.json."""
Refusal = tuple[str, str]
"""Requests of a config.json that we do not compute, and the way out; better said than computed wrongly."""

OTHER = "take another model"
Grid = tuple[int, int, int]
"""Patches of an image: frames, rows, columns."""
Positions = tuple[list[int], list[int], list[int]]
"""Of each token of a prompt: along time, height and width; the same three for text."""


@dataclass(frozen=True)
class VisionFamily:
    """Hold what a family of models that see differs in, beside its weights."""

    tower: str
    """`module:class` of transformers' vision tower, which is built from Vision.config."""
    positions: Callable[[Sequence[int], Sequence[Grid], Vision], Positions]
    """(token ids of a prompt, the grids of its images, sizes) -> rotary positions."""
    parts: tuple[tuple[str, str], ...] = (("visual.merger.", "projector"), ("visual.", "vision"))
    """(beginning of a tensor's name, the part it belongs to, as model.freeze names it): the first that fits."""

    def part(self, tensor: str) -> str:
        """Return which of the parts that can be frozen a tensor belongs to; "" for those of the decoder."""
        return next((part for beginning, part in self.parts if tensor.startswith(beginning)), "")


@dataclass(frozen=True)
class Family:
    """Hold all that the rest of the code asks of a family; models/__init__.py lists them."""

    name: str
    """As ModelShape.family has it."""
    causal_lm: str
    """Its architecture with a language-model head, in config.json: LlamaForCausalLM."""
    rows: tuple[Row, ...]
    """One for each parameter: its Hugging Face, Megatron and vLLM name, and how it is cut."""
    shape: Callable[[Content], dict[str, Any]]
    """Return the fields of ModelShape that config.json decides. Raises KeyError, TypeError, ValueError."""
    refuses: Callable[[Content], list[Refusal]]
    scores: bool = True
    """There are models of it with a score head in place of the language-model head: reward models and critics."""
    extra_layers: bool = False
    """Published with layers more than the model has, for guessing tokens ahead; transformers drops them too."""
    vision: VisionFamily | None = None
    """None: models of text alone."""
    spellings: tuple[tuple[str, str], ...] = ()
    """(beginning of tensors' names in some directories, beginning in the rows)."""

    @property
    def sequence_classification(self) -> str | None:
        """Its architecture with a score head; None: there is none."""
        return self.causal_lm.replace("ForCausalLM", "ForSequenceClassification") if self.scores else None
