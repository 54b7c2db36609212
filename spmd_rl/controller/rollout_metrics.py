"""Numbers about a rollout that rank 0 computes from tickets and scores."""

from collections import Counter
from collections.abc import Sequence

from spmd_rl.config.config import Config
from spmd_rl.config.functions import labels
from spmd_rl.config.names import Phase
from spmd_rl.controller.ranks import Ranks
from spmd_rl.data.samples import SAMPLES
from spmd_rl.data.sampling_params import SamplingParams
from spmd_rl.data.tickets import UNJUDGED, SampleReward, Ticket
from spmd_rl.evaluation.benchmark import Benchmark, ask, measure
from spmd_rl.runlog.run_log import RunLog

CAUSES = ("correct", "wrong", "unparsed", "truncated", "timeout", "crash")


def sample_metrics(tickets: Sequence[Ticket], scored: dict[int, SampleReward], config: Config) -> dict[str, float]:
    """Rewards, scores, causes and lengths of a step's samples."""
    scores = [scored[ticket.id] for ticket in tickets]
    rewards = [score.reward for score in scores]
    metrics = _spread("grpo/rewards", rewards)
    # The raw score is the weighted sum too; only the scores of reward models may be normalised before they enter it.
    metrics |= _spread("grpo/score", [_raw(score, config) for score in scores] if config.reward.models else rewards)
    for name, label in (labels(config.reward.rules) | {name: name for name in config.reward.models}).items():
        metrics[f"grpo/{label}_rewards/mean"] = _mean([score.scores[name] for score in scores if name in score.scores])
    if config.reward.rules:
        causes = Counter(score.cause for score in scores)
        metrics |= {f"reward/cause/{cause}": causes[cause] / max(len(scores), 1) for cause in CAUSES}
        if causes[UNJUDGED]:  # every rule returned None
            metrics[f"reward/cause/{UNJUDGED}"] = causes[UNJUDGED] / len(scores)
    metrics |= _spread("response_length", [ticket.loss_tokens for ticket in tickets])
    metrics |= _spread("prompt_length", [ticket.prompt_tokens for ticket in tickets])
    return metrics


def judged_correct(tickets: Sequence[Ticket], scored: dict[int, SampleReward]) -> list[bool]:
    """Whether each sample is correct; empty when no rule has judged any."""
    causes = [scored[ticket.id].cause for ticket in tickets]
    return [] if set(causes) <= {UNJUDGED} else [cause == "correct" for cause in causes]


def evaluate(ranks: Ranks, benchmarks: Sequence[Benchmark], config: Config, step: int, log: RunLog) -> None:
    """Ask all held-out questions and keep the answers; the ranks are back in training mode afterwards."""
    if not benchmarks:
        return
    metrics: dict[str, float] = {}
    with log.timed(Phase.EVALUATION), ranks.rollout_mode():
        for benchmark in benchmarks:
            lines, _ = ask(ranks, benchmark, step, config.evaluation.samples, evaluation_sampling(config))
            log.questions(step, benchmark.name, lines)
            metrics |= {f"eval/{benchmark.name}/{name}": value for name, value in measure(lines).items()}
    log.evaluation(step, metrics)


def evaluation_sampling(config: Config) -> SamplingParams:
    """As evaluation.* says; responses end as in training."""
    rollout, evaluation = config.rollout, config.evaluation
    return SamplingParams(
        temperature=evaluation.temperature,
        max_tokens=evaluation.max_response_length or rollout.max_response_length,
        top_p=evaluation.top_p,
        top_k=evaluation.top_k,
        stop=rollout.stop,
        stop_token_ids=rollout.stop_token_ids,
    )


def keep_conversations(ranks: Ranks, log: RunLog, tickets: Sequence[Ticket], step: int, count: int) -> None:
    """Write `count` of a step's graded samples, spread over its prompts, to samples/; -1: every rank writes its own.

    A few come to rank 0, which writes one file; all of them would be heavy.
    """
    if count == -1:
        ranks.write_conversations(str(log.run_dir / SAMPLES), step)
    elif count:
        stride = max(1, len(tickets) // count)
        log.samples(step, ranks.conversations([ticket.id for ticket in tickets[::stride][:count]], step))


def _raw(score: SampleReward, config: Config) -> float:
    weights = config.reward.rules | {name: model.weight for name, model in config.reward.models.items()}
    return sum(weights[name] * value for name, value in score.scores.items())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}/mean": _mean(values), f"{name}/max": max(values), f"{name}/min": min(values)}
