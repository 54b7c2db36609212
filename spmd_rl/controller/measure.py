"""Numbers about a rollout that rank 0 computes from tickets and scores."""

from collections import Counter
from collections.abc import Sequence

from spmd_rl.config.config import Config
from spmd_rl.controller.ranks import Ranks
from spmd_rl.controller.run_log import RunLog
from spmd_rl.data.samples import SAMPLES
from spmd_rl.data.tickets import Scored, Ticket

CAUSES = ("correct", "wrong", "unparsed", "truncated", "timeout", "crash")


def sample_metrics(tickets: Sequence[Ticket], scored: dict[int, Scored], config: Config) -> dict[str, float]:
    """Rewards, scores, causes and lengths of a step's samples."""
    scores = [scored[ticket.id] for ticket in tickets]
    rewards = [score.reward for score in scores]
    metrics = _spread("grpo/rewards", rewards)
    # The raw score is the weighted sum too: nothing is added to it before the advantage.
    metrics |= _spread("grpo/score", rewards)
    for rule in config.reward.rules:
        metrics[f"grpo/{rule}_rewards/mean"] = _mean([score.scores[rule] for score in scores])
    causes = Counter(score.cause for score in scores)
    metrics |= {f"reward/cause/{cause}": causes[cause] / max(len(scores), 1) for cause in CAUSES}
    metrics |= _spread("response_length", [ticket.response_tokens for ticket in tickets])
    metrics |= _spread("prompt_length", [ticket.prompt_tokens for ticket in tickets])
    return metrics


def evaluate(ranks: Ranks, problems: int, benchmark: str, step: int) -> dict[str, float]:
    """Greedy accuracy on the held-out problems; the ranks are back in training mode afterwards."""
    if problems == 0:
        return {}
    with ranks.rollout_mode():
        tickets, _ = ranks.generate("eval", range(problems), step, samples_per_prompt=1, greedy=True)
    scored, _ = ranks.rewards()
    ranks.forget()
    causes = Counter(scored[ticket.id].cause for ticket in tickets)
    return {
        f"eval/{benchmark}/accuracy": causes["correct"] / len(tickets),
        f"eval/{benchmark}/unparsed_fraction": causes["unparsed"] / len(tickets),
        f"eval/{benchmark}/truncated_fraction": sum(t.finish_reason == "length" for t in tickets) / len(tickets),
        f"eval/{benchmark}/response_length_mean": _mean([ticket.response_tokens for ticket in tickets]),
    }


def keep_conversations(ranks: Ranks, log: RunLog, tickets: Sequence[Ticket], step: int, count: int) -> None:
    """Write `count` of a step's graded samples, spread over its prompts, to samples/; with -1 every rank writes its own.

    A few come to rank 0, which writes one file; all of them would be heavy.
    """
    if count == -1:
        ranks.write_conversations(str(log.run_dir / SAMPLES), step)
    elif count:
        stride = max(1, len(tickets) // count)
        log.samples(step, ranks.conversations([ticket.id for ticket in tickets[::stride][:count]], step))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(len(values), 1)


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}/mean": _mean(values), f"{name}/max": max(values), f"{name}/min": min(values)}
