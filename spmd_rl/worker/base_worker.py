"""Hold what a rank of every program has, one that trains and one that only generates."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from spmd_rl.config.config import Config
from spmd_rl.config.engine_cache import CacheNeed
from spmd_rl.data.image_reader import ImageReader
from spmd_rl.data.response_text import ResponseText, end_tokens, templates_of
from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.distributed.commands import ControlChannel
from spmd_rl.distributed.layout import RolloutLayout
from spmd_rl.distributed.status import set_status
from spmd_rl.distributed.verb import do, verb, verbs_of
from spmd_rl.distributed.world import World
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.platforms.platform import Platform
from spmd_rl.rewards.grading.pool import GraderPool
from spmd_rl.rollout.engine import Engine
from spmd_rl.rollout.options import switches
from spmd_rl.weights.families import vllm_shard
from spmd_rl.worker.cache_size import cache_bytes
from spmd_rl.worker.image_store import ImageStore
from spmd_rl.worker.rollouts import Made, Rollouts


class BaseWorker:
    """An engine, samples, and graders where there is something to grade."""

    def __init__(
        self,
        config: Config,
        shape: ModelShape,
        platform: Platform,
        world: World,
        max_tokens: int,
        prompts: Mapping[str, Sequence[Prompt]],
        tokenizer: Any,
        pool: GraderPool | None,
        made: dict[int, Made] | None = None,
        images: ImageReader | None = None,
    ):
        """`max_tokens`: the longest prompt with its response; `made`: holds the rank's samples, by id."""
        self.shape, self.world, self.pool = shape, world, pool
        self.rollout_layout = RolloutLayout.of(config.rollout, world.size)
        self.replica = self.rollout_layout.replica(world.rank)
        ends = end_tokens(tokenizer, config.model.path, *templates_of(prompts, config.data.template))
        self.images = ImageStore(shape, prompts, images)
        set_status(doing="starts vLLM")
        weights, need = self._weight_bytes(config.model.dtype), CacheNeed.of(config, shape, world.size)
        cache = cache_bytes(config, need, platform, world, weights)
        self.cache_described = need.described(cache)
        self.engine = Engine(
            config.model.path,
            shape,
            config.model.dtype,
            self.rollout_layout,
            max_tokens,
            config.rollout.max_sequences,
            cache,
            config.rollout.block_tokens,
            bool(config.rollout.stop),
            config.run.seed + self.replica,
            platform,
            config.model.trust_remote_code,
            tuple(ends),
            config.rollout.skip_special_tokens,
            weights,
            config.data.images_per_prompt,
            switches(config.rollout, platform),
            getattr(config.rollout, "router_replay", False),
        )
        set_status(doing="")
        text = ResponseText(tokenizer, tuple(ends), config.rollout.skip_special_tokens)
        self.rollouts = Rollouts(
            self.engine,
            self.rollout_layout,
            world.rank,
            prompts,
            tokenizer,
            pool,
            config.run.seed,
            text,
            {} if made is None else made,
            self.images.of,
        )
        self.done = False
        self._verbs: dict[str, list[Callable]] = defaultdict(list)
        self.own(self, self.rollouts)

    def _weight_bytes(self, dtype: str) -> int:
        """Return what the engine's weights take on this rank."""
        params = vllm_shard(self.shape, self.rollout_layout, self.world.rank).params
        return sum(map(prod, params.values())) * getattr(torch, dtype).itemsize

    def own(self, *components: object) -> None:
        """Take components whose verbs this rank does; one that several have is done by each, and has no answer."""
        for component in components:
            for name, method in verbs_of(component).items():
                self._verbs[name].append(method)

    def serve(self, commands: ControlChannel) -> None:
        """Do what rank 0 tells until it says stop."""
        while not self.done:
            name, arguments = commands.receive()
            commands.answer(self.do(name, arguments))

    def do(self, name: str, arguments: dict[str, Any]) -> Any:
        """Do one verb."""
        set_status(verb=name)
        for method in self._verbs[name]:
            answer = do(method, arguments)
        set_status(verb="")
        return answer

    def close(self) -> None:
        """After the last verb, when all ranks are through with the others."""
        if self.pool is not None:
            self.pool.close()
        self.engine.close()

    @verb
    def stop(self) -> None:
        """Leave the loop of verbs."""
        self.done = True
