"""A rank's life in the programs that only generate: an engine on every rank, filled from a directory of weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_rl.config.config import Config
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.program import control_or_serve, start_graders, user_errors_exit, watch_ranks


@dataclass(frozen=True)
class ServeSpec:
    """What a program that only generates starts from."""

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
    """Where it writes."""


@dataclass(frozen=True)
class ServeContext:
    """What rank 0 tells its story with."""

    servers: Any
    """controller.servers.Servers."""
    server: Any
    """Rank 0's own worker.server.Server."""
    world_size: int
    tokenizer: Any
    prompts: Mapping[str, Sequence[Any]]
    notes: Sequence[str]


Read = Callable[[Any], tuple[Mapping[str, Sequence[Any]], Sequence[str]]]
"""Tokenizer -> prompts by their split, and notes."""


def run_server(given: ServeSpec, read: Read, tell: Callable[[ServeContext], None]) -> None:
    """Start a rank, and on rank 0 control the others. `read`: the prompts to grade answers to; none: no grading."""
    from spmd_rl.platforms import current

    config = given.config
    with user_errors_exit():
        platform = current(given.platform)
        platform.set_environment()
        from spmd_rl.patches import vllm
        from spmd_rl.patches.patch import apply_all
        from spmd_rl.rollout.options import model_options
        from spmd_rl.weights.files.engine_load import open_source

        apply_all(vllm.PATCHES, platform.patches)
        model_options(config.model.path, given.shape, config.rollout.block_tokens, platform)
        for knob, model in zip(("model", "baseline"), given.models, strict=False):
            open_source(model, given.shape, knob)
        from spmd_rl.data.tokens import load_tokenizer

        tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code, "model")
        prompts, notes = read(tokenizer)
        pool = start_graders(config, next(iter(prompts.values()))[0]) if prompts else None
        from spmd_rl.distributed import world as worlds

        world = worlds.start(platform, config.run.collective_timeout_seconds)
        watch = watch_ranks(config, world, given.directory)
    from spmd_rl.worker.serve_worker import ServeWorker

    with user_errors_exit():
        server = ServeWorker(config, given.shape, platform, world, given.max_tokens, prompts, tokenizer, pool)

    def control(commands: Any) -> None:
        from spmd_rl.controller.serve_ranks import Servers

        servers = Servers(commands, server)
        tell(ServeContext(servers, server, world.size, tokenizer, prompts, notes))
        servers.ranks.stop()

    control_or_serve(server, world, config.run.control_timeout_seconds, control, watch)
