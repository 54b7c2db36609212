"""The verbs that a rank of every program has, one that trains and one that only generates."""

from collections.abc import Mapping, Sequence
from typing import Any

from spmd_rl.config.config import Config
from spmd_rl.data.response_text import ResponseText, end_tokens
from spmd_rl.data.sampling_params import SamplingParams
from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.distributed.commands import ControlChannel
from spmd_rl.distributed.layout import RolloutLayout
from spmd_rl.distributed.status import set_status
from spmd_rl.distributed.verb import verb
from spmd_rl.distributed.world import World
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.platforms.platform import Platform
from spmd_rl.rewards.grading.pool import GraderPool
from spmd_rl.rollout.engine import Engine
from spmd_rl.worker.rollouts import Rollouts


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
    ):
        """`max_tokens`: the longest prompt with its response."""
        self.shape, self.world, self.pool = shape, world, pool
        self.rollout_layout = RolloutLayout.of(config.rollout, world.size)
        self.replica = self.rollout_layout.replica(world.rank)
        ends = end_tokens(tokenizer, config.model.path, config.data.template)
        set_status(doing="starts vLLM")
        self.engine = Engine(
            config.model.path,
            shape,
            config.model.dtype,
            self.rollout_layout,
            max_tokens,
            config.rollout.max_sequences,
            int(config.rollout.cache_gib * 2**30),
            config.rollout.block_tokens,
            bool(config.rollout.stop),
            config.run.seed + self.replica,
            platform,
            config.model.trust_remote_code,
            tuple(ends),
            config.rollout.skip_special_tokens,
        )
        set_status(doing="")
        text = ResponseText(tokenizer, tuple(ends), config.rollout.skip_special_tokens)
        self.rollouts = Rollouts(
            self.engine, self.rollout_layout, world.rank, prompts, tokenizer, pool, config.run.seed, text
        )
        self.done = False

    def serve(self, commands: ControlChannel) -> None:
        """Do what rank 0 tells until it says stop."""
        while not self.done:
            name, arguments = commands.receive()
            commands.answer(self.do(name, arguments))

    def do(self, name: str, arguments: dict[str, Any]) -> Any:
        """Do one verb."""
        method = getattr(self, name)
        assert method.is_verb, name
        set_status(verb=name)
        answer = method(**arguments)
        set_status(verb="")
        return answer

    def close(self) -> None:
        """After the last verb, when all ranks are through with the others."""
        if self.pool is not None:
            self.pool.close()
        self.engine.close()

    @verb
    def generate(
        self,
        split: str,
        rows: Sequence[int],
        step: int,
        samples_per_prompt: int,
        sampling: dict[str, Any],
        first_id: int = 0,
    ) -> dict[str, Any]:
        return self.rollouts.generate(split, rows, step, samples_per_prompt, SamplingParams(**sampling), first_id)

    @verb
    def rewards(self) -> dict[str, Any]:
        return self.rollouts.rewards()

    @verb
    def compare_answers(self, split: str, pairs: list[tuple[int, str, str]]) -> list[tuple[int, bool]]:
        return self.rollouts.compare_answers(split, pairs)

    @verb
    def conversations(self, ids: list[int], step: int) -> list[dict[str, Any]]:
        return self.rollouts.conversations(ids, step)

    @verb
    def forget(self) -> None:
        self.rollouts.made.clear()

    @verb
    def stop(self) -> None:
        self.done = True
