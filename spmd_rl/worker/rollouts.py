"""What a rank's engine is asked, and what becomes of its answers: they are kept here, and graded as they come."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from spmd_rl.data.samples import sample_record, samples_file, write_samples
from spmd_rl.data.sampling_params import SamplingParams
from spmd_rl.data.seeds import sample_seed
from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.data.tickets import UNJUDGED, SampleReward, Ticket
from spmd_rl.data.tokens import decode
from spmd_rl.distributed.layout import RolloutLayout
from spmd_rl.rewards.grade import RewardSample
from spmd_rl.rewards.grading.pool import GraderPool
from spmd_rl.rollout.engine import Engine
from spmd_rl.rollout.requests import Completion, Request
from spmd_rl.worker.sample_store import SampleStore


class Rollouts:
    """One rank's share of the verbs that generate and grade, for whoever holds an engine and graders."""

    def __init__(
        self,
        engine: Engine,
        layout: RolloutLayout,
        rank: int,
        prompts: Mapping[str, Sequence[Prompt]],
        tokenizer: Any,
        pool: GraderPool,
        store: SampleStore,
        seed: int,
    ):
        self.engine, self.layout, self.rank = engine, layout, rank
        self.prompts, self.tokenizer, self.pool, self.store, self.seed = prompts, tokenizer, pool, store, seed
        self.replica = layout.replica(rank)
        self.owns_samples = layout.tensor_rank(rank) == 0
        self.graded_seconds = 0.0
        self.heard: Callable[[int, int], None] = lambda done, total: None
        """Hears how many of this rank's samples are made."""

    def generate(
        self, split: str, rows: Sequence[int], step: int, samples_per_prompt: int, sampling: SamplingParams
    ) -> dict[str, Any]:
        """Samples of this rank's share of the prompts; each goes to the graders as it ends."""
        # A row beyond the last one is the same prompt in a later epoch; its seeds are its own.
        prompts = [self.prompts[split][row % len(self.prompts[split])] for row in rows]
        requests = [
            Request(
                id=index * samples_per_prompt + sample,
                prompt=prompts[index].token_ids,
                seed=sample_seed(self.seed, step, rows[index], sample),
            )
            # A prompt's samples stay on one replica, which computes the prompt once.
            for index in range(self.replica, len(rows), self.layout.replicas)
            for sample in range(samples_per_prompt)
        ]
        made: list[Completion] = []

        def finished(completion: Completion) -> None:
            made.append(completion)
            if self.owns_samples:
                self._keep(completion, prompts[completion.id // samples_per_prompt], sampling.max_tokens)
            self.heard(len(made), len(requests))

        started = time.perf_counter()
        self.engine.generate(requests, sampling, finished)
        broken = [completion for completion in made if not bool(completion.logprobs.isfinite().all())]
        if broken:
            first = broken[0].id
            raise RuntimeError(
                f"rank {self.rank}: {len(broken)} of {len(made)} samples have log-probabilities that are not finite "
                f"(the first: sample {first}, of row {rows[first // samples_per_prompt]}): its engine's weights, or "
                "what it computes with them, are broken"
            )
        tickets = [
            Ticket(
                id=completion.id,
                group=completion.id // samples_per_prompt,
                prompt_tokens=len(completion.prompt),
                response_tokens=len(completion.response),
                loss_tokens=len(completion.response),
                finish_reason=completion.finish_reason,
                policy_version=step,
            )
            for completion in made
        ]
        return {
            "tickets": [asdict(ticket) for ticket in tickets] if self.owns_samples else [],
            "seconds": time.perf_counter() - started,
            "prompt_tokens": sum(ticket.prompt_tokens for ticket in tickets),
            "cached_tokens": sum(completion.cached_prompt_tokens for completion in made),
        }

    def _keep(self, completion: Completion, prompt: Prompt, limit: int) -> None:
        """Store a finished sample and give it to the graders while others are still generating."""
        text = decode(self.tokenizer, completion.response.tolist())
        self.store.made[completion.id] = completion
        self.store.texts[completion.id] = text
        self.store.prompts[completion.id] = prompt
        self.pool.submit(
            completion.id,
            RewardSample(
                prompt=prompt.text,
                response=text,
                answer=prompt.answer,
                finish_reason=completion.finish_reason,
                row=prompt.row,
                prompt_ids=list(prompt.token_ids),
                response_ids=completion.response.tolist(),
                response_tokens=len(completion.response),
                response_limit=limit,
            ),
        )

    def rewards(self) -> dict[str, Any]:
        """Wait for this rank's graders."""
        started = time.perf_counter()
        scored = self.pool.collect(block=True)
        waited = time.perf_counter() - started
        self.store.scored = {score.id: score for score in scored}
        told = [asdict(replace(score, extracted=None)) for score in scored]
        return {"scored": told, "busy_seconds": self._newly_busy(), "waited_seconds": waited}

    def compare_answers(self, split: str, pairs: Sequence[tuple[int, str, str]]) -> list[tuple[int, bool]]:
        """Of this rank's share of (row, answer, answer): the pair's number, and whether the graders find them equal."""
        mine = range(self.rank, len(pairs), self.layout.world)
        for number in mine:
            row, gold, other = pairs[number]
            prompt = self.prompts[split][row]
            answer = f"\\boxed{{{other}}}"
            self.pool.submit(
                number,
                RewardSample(
                    prompt=prompt.text,
                    response=answer,
                    answer=gold,
                    row=prompt.row,
                    prompt_ids=list(prompt.token_ids),
                    response_tokens=1,
                    response_limit=2,
                ),
            )
        equal = [(score.id, score.cause == "correct") for score in self.pool.collect(block=True)] if mine else []
        self._newly_busy()
        return equal

    def _newly_busy(self) -> float:
        busy, self.graded_seconds = self.pool.busy_seconds - self.graded_seconds, self.pool.busy_seconds
        return busy

    def conversations(self, ids: Sequence[int], step: int) -> list[dict[str, Any]]:
        """Those of the graded samples that this rank holds, with all that is kept of them."""
        return [self._record(sample, step) for sample in ids if sample in self.store.made]

    def write_conversations(self, directory: str, step: int) -> None:
        """All graded samples of this rank, into a file of its own."""
        if self.store.made:
            lines = (self._record(sample, step) for sample in sorted(self.store.made))
            write_samples(Path(directory) / samples_file(step, self.rank), lines)

    def _record(self, sample: int, step: int) -> dict[str, Any]:
        made, prompt = self.store.made[sample], self.store.prompts[sample]
        return sample_record(
            self.store.scored.get(sample) or SampleReward(sample, 0.0, UNJUDGED, {}),
            step=step,
            index=prompt.index,
            question=prompt.text,
            row=prompt.row,
            prompt=decode(self.tokenizer, made.prompt.tolist(), special=True),
            response=self.store.texts[sample],
            answer=prompt.answer,
            finish_reason=made.finish_reason,
            prompt_tokens=len(made.prompt),
            response_tokens=len(made.response),
        )
