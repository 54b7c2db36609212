"""One sequence that both engines score: what checksums of weights can't see (attention, positions, sampling) shows."""

from dataclasses import dataclass

import torch

from spmd_rl.data.seeds import sample_seed
from spmd_rl.distributed.gather import gather
from spmd_rl.distributed.sample import Sample
from spmd_rl.distributed.world import World
from spmd_rl.rollout.engine import Engine
from spmd_rl.rollout.requests import Completion, PromptImages, Request, SamplingParams
from spmd_rl.worker.trainer import Trainer

TOKENS = 16
# Mean difference of the natural logs over the canary's tokens that rounding can explain.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


@dataclass
class ConsistencyCheck:
    """The canary of one rank: every replica generates it, every data-parallel rank scores what all replicas made."""

    trainer: Trainer
    engine: Engine
    world: World
    replica: int
    prompt: tuple[int, ...]
    images: PromptImages | None
    tolerance: float
    made: Completion | None = None

    def generate(self) -> None:
        """Make a few tokens at the run's temperature, from all of the distribution."""
        trainer = self.trainer
        request = Request(0, self.prompt, sample_seed(trainer.config.run.seed, 0, 0, 0), self.images)
        rollout = trainer.config.rollout
        sampling = SamplingParams(rollout.temperature, min(TOKENS, rollout.max_response_length))
        self.engine.generate([request], sampling, self._keep)

    def _keep(self, completion: Completion) -> None:
        self.made = completion

    def compare(self) -> float | None:
        """Mean |vLLM - Megatron| over the canary's tokens, of the replica that differs most; None when none was made.

        Raises RuntimeError on every rank when it is above the tolerance.
        """
        if self.made is None:
            return None
        made, self.made = self.made, None
        own = made.sample
        mine = (self.replica, own.response.tolist(), own.fields["rollout_logprobs"].tolist())
        everyone = gather(mine, self.world.payload)
        by_replica = {replica: (tuple(tokens), logprobs) for replica, tokens, logprobs in everyone}
        # Replicas that drew the same tokens are scored together.
        texts = list(dict.fromkeys(tokens for tokens, _ in by_replica.values()))
        shown = self.images.fields if self.images else {}
        samples = [Sample.of(n, own.prompt, torch.tensor(tokens), **shown) for n, tokens in enumerate(texts)]
        packs = self.trainer.pack([[samples]], share_prompts=True)
        found, _ = self.trainer.forward("policy", packs)
        gaps = {}
        if self.trainer.place.reports:
            (packed, logprobs), *_ = found
            scored = dict(zip(texts, logprobs.cpu().split(packed.lengths), strict=True))
            for replica, (tokens, logprobs) in by_replica.items():
                gaps[replica] = float((scored[tokens] - torch.tensor(logprobs)).abs().mean())
        found = gather(list(gaps.items()), self.world.payload)
        worst = max((gap, replica) for gaps in found for replica, gap in gaps)
        if not worst[0] <= self.tolerance:  # a NaN is wrong too
            raise RuntimeError(
                f"canary: of {len(own.response)} tokens, vLLM's log-probabilities in engine {worst[1]} and Megatron's "
                f"differ by {worst[0]:.2g} on average, above rollout.canary_tolerance = {self.tolerance:.2g}; the "
                "weights of both are equal by their checksums, so one of them computes something else (attention, "
                "positions, precision). Nothing was trained on samples of this step"
            )
        return worst[0]
