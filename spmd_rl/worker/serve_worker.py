"""One rank of a program that only generates."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from spmd_rl.data.pictures import Picture
from spmd_rl.data.sampling_params import SamplingParams
from spmd_rl.distributed.status import doing
from spmd_rl.distributed.verb import verb
from spmd_rl.rollout.requests import Request
from spmd_rl.weights.families import vllm_shard
from spmd_rl.weights.files.engine_load import fill_engine, open_source
from spmd_rl.worker.base_worker import BaseWorker


class ServeWorker(BaseWorker):
    """One rank. Nothing is trained, nothing of Megatron runs."""

    def __init__(self, *arguments: object):
        super().__init__(*arguments)
        self.shard = vllm_shard(self.shape, self.rollout_layout, self.world.rank)
        self.tokens_heard: Callable[[list[int]], bool] = lambda tokens: False
        """On rank 0: hears the tokens of an answer as they are made, and ends it with True."""

    @verb
    def load(self, model: str) -> None:
        """Fill the engine with a model's weights, in place of what it held."""
        # The old weights and what the cache holds of them go first: there is never room for two.
        self.engine.sleep()
        self.engine.wake_weights()
        with doing(f"loads weights from {model}"):
            fill_engine(open_source(model, self.shape), self.shard, self.engine.weights, self.engine.weights.written)
        self.engine.weights.end()
        self.engine.wake_cache()

    @verb
    def reply(
        self, prompt: tuple[int, ...], seed: int, sampling: SamplingParams, pictures: Sequence[bytes] = ()
    ) -> str:
        """Answer a prompt; all ranks are one engine here, and rank 0 decides for all of them when the answer ends.

        `pictures`: files that the prompt shows.
        """
        images = self.images.decode(prompt, [Picture(content=one) for one in pictures]) if pictures else None

        def heard(tokens: list[int]) -> bool:
            ends = torch.tensor([self.world.rank == 0 and self.tokens_heard(tokens)], dtype=torch.uint8)
            if self.world.size > 1:
                dist.broadcast(ends, src=0, group=self.world.payload)
            return bool(ends)

        return self.engine.stream(Request(0, prompt, seed, images), sampling, heard)
