"""Requests to a rank's engine, and its answers: they are kept here, and graded as they come."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from spmd_rl.data.answers import Generated, Graded
from spmd_rl.data.pictures import thumbnail
from spmd_rl.data.response_text import ResponseText
from spmd_rl.data.samples import sample_record, samples_file, write_samples
from spmd_rl.data.sampling_params import SamplingParams
from spmd_rl.data.seeds import sample_seed
from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.data.tickets import UNJUDGED, SampleReward, Ticket
from spmd_rl.data.tokens import decode
from spmd_rl.distributed.layout import RolloutLayout
from spmd_rl.distributed.verb import verb
from spmd_rl.rewards.grading.pool import GraderPool
from spmd_rl.rewards.reward_sample import of_answer, of_tokens
from spmd_rl.rollout.engine import Engine
from spmd_rl.rollout.requests import Completion, PromptImages, Request


@dataclass
class Made:
    """Hold a sample on the rank that generated it."""

    completion: Completion
    prompt: Prompt
    text: str
    reward: SampleReward | None = None


THINKING = "</think>"
"""Is in a response that has thought, whoever opened the block."""


class Rollouts:
    """Do one rank's share of the verbs that generate and grade, for whoever holds an engine and graders."""

    def __init__(
        self,
        engine: Engine,
        layout: RolloutLayout,
        rank: int,
        prompts: Mapping[str, Sequence[Prompt]],
        tokenizer: Any,
        pool: GraderPool,
        seed: int,
        text: ResponseText,
        made: dict[int, Made],
        images: Callable[[str, int], PromptImages | None] = lambda split, row: None,
    ):
        """`made`: the rank's samples by id, which others look at. `images`: of a split's row."""
        self.engine, self.layout, self.rank = engine, layout, rank
        self.prompts, self.pool, self.seed, self.text = prompts, pool, seed, text
        self.made, self.images = made, images
        self.rendered = lru_cache(1024)(lambda ids: decode(tokenizer, ids, special=True))
        """Token ids of a prompt -> its text as the model is shown it."""
        self.replica = layout.replica(rank)
        self.owns_samples = layout.tensor_rank(rank) == 0
        self.graded_seconds = 0.0
        self.heard: Callable[[int, int], None] = lambda done, total: None
        """Hears how many of this rank's samples are made."""
        self.on_completion: Callable[[Completion], None] = lambda completion: None
        """Sees each sample before anybody else does."""

    @verb
    def generate(
        self,
        split: str,
        rows: Sequence[int],
        step: int,
        samples_per_prompt: int,
        sampling: SamplingParams,
        first_id: int = 0,
    ) -> Generated:
        """Sample this rank's share of the prompts; each sample goes to the graders as it ends.

        `first_id`: of the first sample, where earlier ones of the step have others; a multiple of `samples_per_prompt`.
        """
        assert first_id % samples_per_prompt == 0, f"{first_id} is inside a group of {samples_per_prompt}"
        # A row beyond the last one is the same prompt in a later epoch; its seeds are its own.
        prompts = [self.prompts[split][row % len(self.prompts[split])] for row in rows]
        requests = [
            Request(
                id=first_id + index * samples_per_prompt + sample,
                prompt=prompts[index].token_ids,
                seed=sample_seed(self.seed, step, rows[index], sample),
                images=self.images(split, rows[index]),
            )
            # A prompt's samples stay on one replica, which computes the prompt once.
            for index in range(self.replica, len(rows), self.layout.replicas)
            for sample in range(samples_per_prompt)
        ]
        made: list[Completion] = []

        def finished(completion: Completion) -> None:
            self.on_completion(completion)
            made.append(completion)
            if self.owns_samples:
                prompt = prompts[(completion.sample.id - first_id) // samples_per_prompt]
                self._keep(completion, prompt, sampling.max_tokens)
            self.heard(len(made), len(requests))

        started = time.perf_counter()
        self.engine.generate(requests, sampling, finished)
        samples = [completion.sample for completion in made]
        broken = [one for one in samples if not bool(one.fields["rollout_logprobs"].isfinite().all())]
        if broken:
            first = broken[0].id
            row = rows[(first - first_id) // samples_per_prompt]
            raise RuntimeError(
                f"rank {self.rank}: {len(broken)} of {len(made)} samples have log-probabilities that are not finite "
                f"(the first: sample {first}, of row {row}): its engine's weights, or what it computes with them, are "
                "broken"
            )
        tickets = [
            Ticket(
                id=completion.sample.id,
                group=completion.sample.id // samples_per_prompt,
                prompt_tokens=completion.sample.prompt_tokens,
                response_tokens=len(completion.sample.response),
                loss_tokens=completion.sample.loss_tokens,
                finish_reason=completion.finish_reason,
                policy_version=step,
                owner=self.rank,
                image_tokens=len(completion.sample.fields.get("image_places", ())),
                patches=prompts[(completion.sample.id - first_id) // samples_per_prompt].patches,
            )
            for completion in made
        ]
        seconds = time.perf_counter() - started
        return Generated(
            tickets=tickets if self.owns_samples else [],
            most_seconds=seconds,
            least_seconds=seconds,
            prompt_tokens=sum(ticket.prompt_tokens for ticket in tickets),
            cached_tokens=sum(completion.cached_prompt_tokens for completion in made),
        )

    def _keep(self, completion: Completion, prompt: Prompt, limit: int) -> None:
        """Store a finished sample and give it to the graders while others are still generating."""
        response = completion.sample.response.tolist()
        text = self.text(response)
        self.made[completion.sample.id] = Made(completion, prompt, text)
        shown, reason = self.rendered(prompt.token_ids), completion.finish_reason
        self.pool.submit(completion.sample.id, of_tokens(prompt, shown, text, response, reason, limit))

    @verb
    def rewards(self) -> Graded:
        """Wait for this rank's graders."""
        started = time.perf_counter()
        texts = [made.text for made in self.made.values() if made.reward is None]
        scored = self.pool.collect(block=True)
        waited = time.perf_counter() - started
        for score in scored:
            self.made[score.id].reward = score
        told = [replace(score, extracted=None) for score in scored]
        thinking = sum(THINKING in text for text in texts)  # a template may have written <think> itself
        return Graded(told, self._newly_busy(), waited, len(texts), thinking)

    @verb
    def keep_rewards(self, scored: Sequence[SampleReward]) -> None:
        """Keep what this rank's samples earned in the end."""
        for one in scored:
            made = self.made[one.id]
            made.reward = replace(one, extracted=made.reward.extracted if made.reward else None)

    @verb
    def compare_answers(self, split: str, pairs: Sequence[tuple[int, str, str]]) -> list[tuple[int, bool]]:
        """Of this rank's share of (row, answer, answer): the pair's number, and whether the graders find them equal."""
        mine = range(self.rank, len(pairs), self.layout.world)
        for number in mine:
            row, gold, other = pairs[number]
            prompt = self.prompts[split][row]
            answer = f"\\boxed{{{other}}}"
            self.pool.submit(number, of_answer(prompt, self.rendered(prompt.token_ids), answer, gold))
        equal = [(score.id, score.cause == "correct") for score in self.pool.collect(block=True)] if mine else []
        self._newly_busy()
        return equal

    def _newly_busy(self) -> float:
        busy, self.graded_seconds = self.pool.busy_seconds - self.graded_seconds, self.pool.busy_seconds
        return busy

    @verb
    def conversations(self, ids: Sequence[int], step: int) -> list[dict[str, Any]]:
        """Those of the graded samples that this rank holds, with all that is kept of them."""
        shown: set[int] = set()
        return [self._record(sample, step, shown) for sample in ids if sample in self.made]

    @verb
    def write_conversations(self, directory: str, step: int) -> None:
        """All graded samples of this rank, into a file of its own."""
        if self.made:
            shown: set[int] = set()
            lines = (self._record(sample, step, shown) for sample in sorted(self.made))
            write_samples(Path(directory) / samples_file(step, self.rank), lines)

    @verb
    def forget(self) -> None:
        """Drop the samples."""
        self.made.clear()

    def _record(self, sample: int, step: int, shown: set[int]) -> dict[str, Any]:
        """Return a sample's line; small pictures stand in the first of each prompt, which are noted in `shown`."""
        made = self.made[sample]
        drawn, prompt = made.completion.sample, made.prompt
        pictures = () if id(prompt) in shown else prompt.pictures
        shown.add(id(prompt))
        return sample_record(
            made.reward or SampleReward(sample, 0.0, UNJUDGED, {}),
            step=step,
            index=prompt.index,
            question=prompt.text,
            row=prompt.row,
            prompt=self.rendered(prompt.token_ids),
            response=made.text,
            answer=prompt.answer,
            finish_reason=made.completion.finish_reason,
            prompt_tokens=drawn.prompt_tokens,
            prompt_ids=list(prompt.token_ids),
            response_tokens=len(drawn.response),
            response_ids=drawn.response.tolist(),
            **({"thumbnails": [thumbnail(picture) for picture in pictures]} if pictures else {}),
        )
