"""Every verb, as rank 0 tells it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from spmd_rl.algorithms.token_statistics import GAE_SPREADS, Spread, joined
from spmd_rl.config.names import MEMORY_PHASES, RESTING, Phase, Verb
from spmd_rl.controller.planner import Plan
from spmd_rl.data.answers import Costs, Estimated, Exchanged, Generated, Graded, Judged, Learned, Progress, Refreshed
from spmd_rl.data.digests import UNREADABLE
from spmd_rl.data.sampling_params import SamplingParams
from spmd_rl.data.tickets import SampleReward, Ticket
from spmd_rl.distributed.verb import verb

HOLDS = {
    "resident_bytes": "memory/resident_bytes",
    "children_bytes": "memory/children_bytes",
    "open_files": "process/open_files",
    "processes": "process/children",
    "shared_memory_files": "process/shared_memory_files",
    "temporary_files": "process/temporary_files",
}
"""A rank's use of its machine (worker/process_usage.py), as the metrics call it."""


Timed = Callable[[str], AbstractContextManager[None]]


def untimed(phase: str) -> AbstractContextManager[None]:
    """Measures nothing."""
    return nullcontext()


class PendingProtocol(Protocol):
    """A verb on its way: distributed.commands.Pending."""

    own_arguments: dict[str, Any] | None

    def wait(self) -> None: ...

    def answer(self, own: Any = None) -> Any: ...


class ChannelProtocol(Protocol):
    """Rank 0's end of the control group: distributed.commands.ControlChannel."""

    def post(
        self,
        verb: str,
        arguments: Mapping[str, Any],
        ranks: Sequence[int] | None = None,
        by_rank: Sequence[Mapping[str, Any]] | None = None,
    ) -> PendingProtocol: ...

    @property
    def bytes_moved(self) -> int: ...


class WorkerProtocol(Protocol):
    """Rank 0's own worker: it does each verb like every other rank's."""

    data_ranks: Sequence[int]
    """The data-parallel rank of each rank; only where samples are exchanged."""

    def do(self, name: str, arguments: dict[str, Any]) -> Any: ...


class Ranks:
    """All ranks, rank 0 included: each method is one collective act."""

    def __init__(self, commands: ChannelProtocol, worker: WorkerProtocol):
        self.commands = commands
        self.worker = worker
        self.controller_bytes = 0
        self._owners: dict[int, int] = {}
        """Sample -> the rank that made it, of those that are kept."""
        self._homes: dict[int, int] = {}
        """Sample -> the data-parallel rank that trains on it, of those that were exchanged."""
        self.suspects: list[int] = []
        """Return, where the newest update was skipped, its samples with the largest losses."""
        self.idle = True
        """No verb is under way, and none has failed: the ranks wait for the next one."""

    def _all(self, verb: Verb, by_rank: Sequence[Mapping[str, Any]] | None = None, **arguments: Any) -> Any:
        """Have every rank do a verb, `by_rank` with arguments of its own; return their answer (data.answers)."""
        self.idle = False
        pending = self.commands.post(verb, arguments, by_rank=by_rank)
        pending.wait()
        answer = pending.answer(self.worker.do(verb, pending.own_arguments or {}))
        self.idle = True
        return answer

    def _routes(self, plan: Plan) -> list[dict[str, Any]]:
        """Return of each rank where the samples go that it made, and its own part of the plan."""
        routes: list[dict[int, int]] = [{} for _ in self.worker.data_ranks]
        for sample, data_rank in _homes(plan).items():
            routes[self._owners[sample]][sample] = data_rank
        parts = [[minibatch.microbatches[data] for minibatch in plan.minibatches] for data in self.worker.data_ranks]
        return [{"routes": route, "minibatches": part} for route, part in zip(routes, parts, strict=True)]

    @contextmanager
    def rollout_mode(self, timed: Timed = untimed, canary: bool = False) -> Iterator[dict[str, float]]:
        """vLLM holds the device inside, with the policy's weights; yields what the refresh moved.

        `canary`: both engines score the same few tokens; their difference is among what was yielded, afterwards.
        """
        with timed(Phase.TO_ROLLOUT):
            moved = self.to_rollout(canary)
        yield moved
        # Not after an error: it may be that a rank no longer answers.
        with timed(Phase.TO_TRAINING):
            moved |= self.to_training()

    @verb
    def to_rollout(self, canary: bool = False) -> dict[str, float]:
        """Refresh vLLM from Megatron, prove it, and give vLLM the device. Returns metrics."""
        moved: Refreshed = self._all(Verb.TO_ROLLOUT, canary=canary)
        return {
            "bytes/reshard_to_infer/network": moved.network_bytes,
            "bytes/reshard_to_infer/local": moved.local_bytes,
        }

    @verb
    def to_training(self) -> dict[str, float]:
        """Give Megatron the device, and let it score the canary that vLLM made, if it did. Returns metrics."""
        gap: float | None = self._all(Verb.TO_TRAINING)
        return {} if gap is None else {"correction/canary_gap": gap}

    @verb
    def generate(
        self,
        split: str,
        rows: Sequence[int],
        step: int,
        samples_per_prompt: int,
        sampling: SamplingParams,
        first_id: int = 0,
    ) -> tuple[list[Ticket], dict[str, float]]:
        """Sample these prompts; each sample is graded as it ends. Returns tickets in order of id, and metrics.

        `first_id`: of the first sample, where earlier ones of the step have others; a multiple of `samples_per_prompt`.
        """
        made: Generated = self._all(
            Verb.GENERATE,
            split=split,
            rows=list(rows),
            step=step,
            samples_per_prompt=samples_per_prompt,
            sampling=sampling,
            first_id=first_id,
        )
        tickets = sorted(made.tickets, key=lambda ticket: ticket.id)
        self._owners |= {ticket.id: ticket.owner for ticket in tickets}
        return tickets, {
            "rollout/imbalance_fraction": 1.0 - made.least_seconds / max(made.most_seconds, 1e-9),
            "rollout/prefix_cache_hit_fraction": made.cached_tokens / max(made.prompt_tokens, 1),
            "rollout/truncated_fraction": sum(ticket.finish_reason == "length" for ticket in tickets)
            / max(len(tickets), 1),
        }

    @verb
    def rewards(self) -> tuple[dict[int, SampleReward], dict[str, float]]:
        """Wait for the graders; every sample's score by id, and metrics."""
        graded: Graded = self._all(Verb.REWARDS)
        metrics = {
            "timing/rule_reward": graded.busy_seconds,
            "timing/non_overlap_rule_reward": graded.waited_seconds,
        }
        if graded.responses:
            metrics["response/think_fraction"] = graded.thinking / graded.responses
        return {score.id: score for score in graded.scored}, metrics

    @verb
    def compare_answers(self, split: str, pairs: Sequence[tuple[int, str, str]]) -> list[bool]:
        """Of each (row, answer, answer): whether the rules that grade the row's samples find the two equal."""
        if not pairs:
            return []
        found = dict(self._all(Verb.COMPARE_ANSWERS, split=split, pairs=list(pairs)))
        return [found[number] for number in range(len(pairs))]

    @verb
    def exchange(self, plan: Plan) -> dict[str, float]:
        """Bring every sample to the ranks that train on it, in one all-to-all. Returns metrics."""
        laid: Exchanged = self._all(Verb.EXCHANGE, self._routes(plan), share_prompts=plan.share_prompts)
        self._homes = _homes(plan)
        return {
            "bytes/exchange/network": laid.network_bytes,
            "update/padding_fraction": laid.padding_tokens / max(laid.tokens, 1),
            "update/imbalance_fraction": 1.0 - laid.tokens / max(laid.ranks * laid.most_tokens, 1),
        }

    @verb
    def score(self, model: str, left_out: int = 0) -> dict[str, float]:
        """Have a model give each exchanged sample its log-probabilities, which stay on the ranks. Returns metrics.

        `left_out`: mini-batches at the beginning that get none.
        """
        seconds: dict[str, float] = self._all(Verb.SCORE, model=model, left_out=left_out)
        return {f"timing/{move}": taken for move, taken in seconds.items()}

    @verb
    def sample_kl(self) -> dict[int, float]:
        """Return of each exchanged sample, by id, the sum of its tokens' estimated divergence from the reference."""
        return dict(self._all(Verb.SAMPLE_KL))

    @verb
    def put(self, field: str, values: Mapping[int, float]) -> None:
        """Set a field of exchanged samples, by id: one number for each of a sample's loss tokens."""
        self._all(Verb.PUT, self._at_home("values", values), field=field)

    def _at_home(self, name: str, values: Mapping[int, float]) -> list[dict[str, Any]]:
        """Return of each rank, as an argument of that name, the numbers of the samples that it trains on."""
        parts: dict[int, dict[int, float]] = {data_rank: {} for data_rank in self.worker.data_ranks}
        for sample, value in values.items():
            parts[self._homes[sample]][sample] = value
        return [{name: parts[data_rank]} for data_rank in self.worker.data_ranks]

    @verb
    def estimate_gae(self, rewards: Mapping[int, float], beta: float) -> tuple[dict[str, Spread], dict[str, float]]:
        """Give each token of the exchanged samples its advantage and its return, from the critic's values.

        `rewards`: of samples, by id. `beta`: KL coefficient, of the reference in a token's reward. Returns the
        spread over all ranks of tokens' advantages, returns and values, and of samples' rewards and divergences;
        and metrics.
        """
        found: Estimated = self._all(Verb.ESTIMATE_GAE, self._at_home("rewards", rewards), beta=beta)
        spreads = {name: joined(Spread.of(told[name]) for told in found.told) for name in GAE_SPREADS}
        return spreads, {"timing/kl": found.kl_seconds}

    @verb
    def whiten(self, field: str, mean: float, scale: float) -> Spread | None:
        """Make (value - mean) * scale of a field of all exchanged samples.

        Returns the spread of what it came to over all ranks where algorithm.advantage_clip bounds it; else None.
        """
        told: list[list[float]] = self._all(Verb.WHITEN, field=field, mean=mean, scale=scale)
        return joined(map(Spread.of, told)) if told else None

    @verb
    def read(self, model: str) -> dict[int, tuple[int, int]]:
        """Have a reward model's tokenizer read all samples.

        Returns of each the tokens that it has in common with its prompt's other samples, and those after them.
        """
        return {sample: (shared, own) for sample, shared, own in self._all(Verb.READ, model=model)}

    @verb
    def judge(self, model: str, plan: Plan) -> tuple[dict[int, float], dict[str, float]]:
        """A reward model's scores, by id, of what it has read; and metrics."""
        judged: Judged = self._all(Verb.JUDGE, self._routes(plan), model=model, share_prompts=plan.share_prompts)
        scores = dict(judged.scores)
        samples = len(plan.minibatches[0].ids)
        assert len(scores) == samples, f"{len(scores)} scores of {samples} samples"
        return scores, {
            "bytes/reward_model/network": judged.network_bytes,
            **{f"timing/reward_model_{move}": taken for move, taken in judged.seconds.items()},
        }

    @verb
    def learn(self, model: str, minibatch: int, learning_rate: float) -> tuple[dict[str, float], str]:
        """Make one optimizer step of a model on a mini-batch, whose samples have all fields that its loss reads.

        Returns metrics, and why the update was skipped; "" where it was made.
        """
        learned: Learned = self._all(Verb.LEARN, model=model, minibatch=minibatch, learning_rate=learning_rate)
        sums: dict[str, float] = {}
        for of_rank in learned.sums:
            for name, value in of_rank.items():
                sums[name] = sums.get(name, 0.0) + value
        tokens = max(sums.pop("tokens", 0.0), 1.0)
        metrics = {name: value / tokens for name, value in sums.items() if not name.endswith("_loss")}
        metrics |= {name: value for name, value in sums.items() if name.endswith("_loss")}
        metrics |= {
            **learned.maxima,
            **{f"timing/{move}": taken for move, taken in learned.moves.items()},
            "grad_norm": learned.grad_norm,
            "update/skipped": float(not learned.updated),
        }
        self.suspects = [sample for sample, _ in learned.suspects]
        return metrics, "" if learned.updated else _why_skipped(learned)

    @verb
    def conversations(self, ids: Sequence[int], step: int) -> list[dict[str, Any]]:
        """A few graded samples of `step` with all that is kept of them, in the order of `ids`."""
        found = {text["id"]: text for text in self._all(Verb.CONVERSATIONS, ids=list(ids), step=step)}
        return [found[sample] for sample in ids]

    @verb
    def write_conversations(self, directory: str, step: int) -> None:
        """Every rank writes all its graded samples of `step` into a file of its own: no text comes to rank 0."""
        self._all(Verb.WRITE_CONVERSATIONS, directory=directory, step=step)

    @verb
    def forget(self) -> None:
        """Drop the samples of this step."""
        self._all(Verb.FORGET)
        self._owners = {}

    @verb
    def export_hf(self, directory: str) -> None:
        """Write the policy as a Hugging Face directory."""
        self._all(Verb.EXPORT_HF, directory=directory)

    @verb
    def checkpoint_bytes(self) -> int:
        """Return about what all ranks together would write."""
        return self._all(Verb.CHECKPOINT_BYTES)

    @verb
    def begin_checkpoint(self, directory: str) -> None:
        """Have the ranks write into an empty directory, or one of its name on their node; they train on meanwhile."""
        self._all(Verb.BEGIN_CHECKPOINT, directory=directory)

    @verb
    def checkpoint_progress(self, wait: bool) -> tuple[bool, str | None, bool]:
        """Return whether all have written, what failed, and whether any was asked (SIGUSR1) to save and end."""
        progress: Progress = self._all(Verb.CHECKPOINT_PROGRESS, wait=wait)
        return progress.written, progress.failed, progress.asked

    @verb
    def checkpoint_files(self, directory: str) -> dict[str, list[int]]:
        """Return of files that nodes without rank 0's disk have written: bytes, and the number of the node."""
        return self._all(Verb.CHECKPOINT_FILES, directory=directory)

    @verb
    def complete_checkpoint(self, name: str, texts: dict[str, str]) -> None:
        """Have such nodes complete what they have of a checkpoint. Raises OSError where one can't."""
        if failed := self._all(Verb.COMPLETE_CHECKPOINT, name=name, texts=texts):
            raise OSError("; ".join(failed))

    @verb
    def checkpoint_digests(self, directory: str, names: Sequence[str], wait: bool) -> dict[str, str] | None:
        """The digests of a directory's files, which the ranks share; None while some are still at it.

        Raises OSError when one can't be read again.
        """
        found: dict[str, str] | None = self._all(
            Verb.CHECKPOINT_DIGESTS, directory=directory, names=list(names), wait=wait
        )
        for name, value in (found or {}).items():
            if value.startswith(UNREADABLE):
                raise OSError(f"{directory}/{name}: {value}")
        return found

    @verb
    def keep_rewards(self, scored: Mapping[int, SampleReward]) -> None:
        """Tell the ranks what their samples earned in the end, for those who write them down."""
        parts: list[list[SampleReward]] = [[] for _ in self.worker.data_ranks]
        for one in scored.values():
            parts[self._owners[one.id]].append(one)
        self._all(Verb.KEEP_REWARDS, [{"scored": part} for part in parts])

    @verb
    def costs(self) -> tuple[dict[str, float], list[dict[str, int]]]:
        """Since the last time: the peak memory of the hungriest rank in each phase, and what went through rank 0.

        And now, of the rank that holds most: what HOLDS names. Returns metrics, and what each rank holds.
        """
        costs: Costs = self._all(Verb.COSTS)
        peaks = costs.peaks
        metrics: dict[str, float] = {
            f"memory/{phase}/peak_bytes": peaks[name] for name, phase in MEMORY_PHASES.items() if name in peaks
        }
        if RESTING in peaks:
            metrics["memory/start/resident_bytes"] = peaks[RESTING]
        holds = [{metric: of_rank[name] for name, metric in HOLDS.items()} for of_rank in costs.holds]
        metrics |= {metric: max(rank[metric] for rank in holds) for metric in HOLDS.values()}
        metrics |= {f"images/{name}": count for name, count in costs.images.items()}
        metrics |= {"timing/image_embeds": costs.image_seconds} if costs.images else {}
        moved, self.controller_bytes = self.commands.bytes_moved - self.controller_bytes, self.commands.bytes_moved
        return metrics | {"memory/peak_bytes": max(peaks.values()), "bytes/controller": moved}, holds

    @verb
    def stop(self) -> None:
        """The last verb: every rank leaves its loop."""
        self._all(Verb.STOP)


def _homes(plan: Plan) -> dict[int, int]:
    """Return the data-parallel rank of each sample of a plan."""
    return {
        sample: data_rank
        for minibatch in plan.minibatches
        for data_rank, batches in enumerate(minibatch.microbatches)
        for batch in batches
        for group in batch
        for sample in group
    }


def _why_skipped(learned: Learned) -> str:
    """Return which bound it is beyond, or whose loss or gradient is not finite."""
    if learned.beyond:
        return learned.beyond
    norm = f"the norm of the gradient is {learned.grad_norm}"
    if learned.losses_broken:
        return f"{norm}; {learned.losses_broken[0]} is not finite"
    found = [f"of {broken}" for broken in learned.gradients_broken]
    return f"{norm}; not finite is that {', '.join(found)}" if found else norm
