"""Every verb of the programs that only generate, as every rank does it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from spmd_rl.config.config import Config
from spmd_rl.config.model_shape import ModelShape
from spmd_rl.data.prompts import Prompt
from spmd_rl.data.sampling import Sampling
from spmd_rl.distributed.commands import Commands
from spmd_rl.distributed.layout import RolloutLayout
from spmd_rl.distributed.verb import verb
from spmd_rl.distributed.whereabouts import at, move
from spmd_rl.distributed.world import World
from spmd_rl.platforms.platform import Platform
from spmd_rl.rewards.pool import GraderPool
from spmd_rl.rollout.engine import Engine
from spmd_rl.rollout.requests import Request
from spmd_rl.weights.families import vllm_shard
from spmd_rl.weights.served import fill_engine, open_source
from spmd_rl.worker.rollouts import Rollouts
from spmd_rl.worker.sample_store import SampleStore


class Server:
    """One rank: an engine, and graders where there is something to grade. Nothing is trained, nothing of Megatron runs.

    `max_tokens`: the longest prompt with its response.
    """

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
        self.shape, self.world, self.pool = shape, world, pool
        layout = RolloutLayout.of(config.rollout, world.size)
        self.shard = vllm_shard(shape, layout, world.rank)
        move(doing="starts vLLM")
        self.engine = Engine(
            config.model.path,
            shape,
            config.model.dtype,
            layout,
            max_tokens,
            config.rollout.max_sequences,
            int(config.rollout.cache_gib * 2**30),
            config.rollout.block_tokens,
            bool(config.rollout.stop),
            config.run.seed + layout.replica(world.rank),
            platform,
            config.model.trust_remote_code,
        )
        move(doing="")
        self.store = SampleStore()
        self.rollouts = Rollouts(self.engine, layout, world.rank, prompts, tokenizer, pool, self.store, config.run.seed)
        self.tokens_heard: Callable[[list[int]], bool] = lambda tokens: False
        """On rank 0: hears the tokens of an answer as they are made, and ends it with True."""
        self.done = False

    def serve(self, commands: Commands) -> None:
        """Do what rank 0 tells until it says stop."""
        while not self.done:
            name, arguments = commands.receive()
            commands.answer(self.do(name, arguments))

    def do(self, name: str, arguments: dict[str, Any]) -> Any:
        """Do one verb."""
        method = getattr(self, name)
        assert method.is_verb, name
        move(verb=name)
        answer = method(**arguments)
        move(verb="")
        return answer

    def close(self) -> None:
        """After the last verb, when all ranks are through with the others."""
        if self.pool is not None:
            self.pool.close()
        self.engine.close()

    @verb
    def load(self, model: str) -> None:
        # The old weights and what the cache holds of them go first: there is never room for two.
        self.engine.sleep()
        self.engine.wake_weights()
        with at(f"loads weights from {model}"):
            fill_engine(open_source(model, self.shape), self.shard, self.engine.writer(), self.engine.written)
        self.engine.weights_written()
        self.engine.wake_cache()

    @verb
    def generate(
        self, split: str, rows: Sequence[int], step: int, samples_per_prompt: int, sampling: dict[str, Any]
    ) -> dict[str, Any]:
        return self.rollouts.generate(split, rows, step, samples_per_prompt, Sampling(**sampling))

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
        self.store.forget()

    @verb
    def reply(self, prompt: list[int], seed: int, sampling: dict[str, Any]) -> str:
        """All ranks are one engine here: rank 0's word decides for all of them when an answer is to end."""

        def heard(tokens: list[int]) -> bool:
            ends = torch.tensor([self.world.rank == 0 and self.tokens_heard(tokens)], dtype=torch.uint8)
            if self.world.size > 1:
                dist.broadcast(ends, src=0, group=self.world.payload)
            return bool(ends)

        return self.engine.stream(Request(0, tuple(prompt), seed), Sampling(**sampling), heard)

    @verb
    def stop(self) -> None:
        self.done = True
