"""Programs that only generate: an engine on every rank, filled from a directory of weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd_rl.config.config import Config
from spmd_rl.controller.serve_ranks import Servers
from spmd_rl.data.image_reader import ImageReader
from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.data.tokens import load_tokenizer
from spmd_rl.distributed.status import doing
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.patches.unused_imports import left_out, unused
from spmd_rl.program import Rank
from spmd_rl.runtime.startup import Inputs

if TYPE_CHECKING:  # torch stays out until the settings are right
    from spmd_rl.distributed.commands import ControlChannel
    from spmd_rl.worker.serve_worker import ServeWorker


@dataclass(frozen=True)
class ServeSpec:
    """Hold what a program that only generates starts from."""

    config: Config
    """Whose model.path has the config.json and the tokenizer."""
    shape: ModelShape
    models: tuple[str, ...]
    """Directories of weights, each of this shape, that the engines will hold one after another."""
    max_tokens: int
    """The longest prompt with its response."""
    platform: str
    """As run.platform."""
    directory: Path | None = None
    """The directory that it writes to."""


Read = Callable[[Any, ImageReader | None], tuple[Mapping[str, Sequence[Prompt]], Sequence[str]]]
"""(tokenizer, reader of pictures) -> prompts by their split, and notes."""


@dataclass
class Serving:
    """Have the ranks generate what `run` asks them for; see program.Program.

    `run` has `rank`, rank 0's own `worker`, and `servers`.
    """

    spec: ServeSpec
    read_prompts: Read
    """The prompts to grade answers to; none: nothing is graded."""
    run: "Callable[[Serving], None]"
    trains = False
    begun = False

    def __post_init__(self) -> None:
        spec = self.spec
        self.config, self.shape, self.platform, self.directory = spec.config, spec.shape, spec.platform, spec.directory

    def read(self) -> Inputs:
        """Look into the weights, then read the prompts."""
        from spmd_rl.weights.files.engine_load import open_source

        for knob, model in zip(("model", "baseline"), self.spec.models, strict=False):
            open_source(model, self.shape, knob)
        tokenizer = load_tokenizer(self.config.model.path, self.config.model.trust_remote_code, "model")
        vision = self.shape.vision
        images = None if vision is None else ImageReader(self.config.model.path, vision, self.config.data)
        return Inputs(tokenizer, *self.read_prompts(tokenizer, images), images=images)

    def build(self, rank: Rank) -> "ServeWorker":
        """Build the worker."""
        with doing("imports vLLM"), left_out(unused()):
            from spmd_rl.rollout.engine import import_vllm
            from spmd_rl.worker.serve_worker import ServeWorker

            import_vllm()
        inputs, longest = rank.inputs, self.spec.max_tokens
        parts = rank.platform, rank.world, longest, inputs.prompts, inputs.tokenizer, rank.graders
        self.rank, self.worker = rank, ServeWorker(self.config, self.shape, *parts, None, inputs.images)
        return self.worker

    def control(self, channel: "ControlChannel") -> None:
        """Run what the ranks are for."""
        self.servers = Servers(channel, self.worker)
        self.run(self)
        self.servers.ranks.stop()
