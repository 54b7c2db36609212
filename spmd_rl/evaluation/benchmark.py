"""Ask questions with known answers, and say how many a model can answer: in training, and by itself."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from spmd_rl.config.config import Config
from spmd_rl.data.sampling_params import SamplingParams
from spmd_rl.data.tickets import UNJUDGED, SampleReward, Ticket
from spmd_rl.evaluation.estimators import clustered, majority_at_k, mcnemar, pass_at_k, powers_of_two, wilson


@dataclass(frozen=True)
class Benchmark:
    """Questions that the ranks have read."""

    name: str
    split: str
    """The name under which the ranks keep its prompts."""
    questions: int


Line = dict[str, Any]
"""One question with its samples, as it is written to a file: `index`, `question`, `answer`, `prompt`, `prompt_tokens`,
`row`, `thumbnails` (of the pictures it shows, where it does), `samples` (each with `response`, `response_tokens`,
`finish_reason`, `cause`, `extracted`), `accuracy`, `votes` (each with `answer`, `count`, `correct`, the most frequent
first; None where the rule does not say what it read)."""
# Of a sample, what belongs to its question, and what to itself.
_QUESTION = ("index", "question", "answer", "prompt", "prompt_tokens", "row")
_SAMPLE = ("response", "response_tokens", "finish_reason", "cause", "extracted")

# (row, answer, answer) -> whether they are equal
Equal = Callable[[Sequence[tuple[int, str, str]]], Sequence[bool]]


class Answerers(Protocol):
    """The ranks, as far as they answer questions (controller.ranks.Ranks)."""

    def generate(
        self, split: str, rows: Sequence[int], step: int, samples_per_prompt: int, sampling: SamplingParams
    ) -> tuple[list[Ticket], dict[str, float]]: ...

    def rewards(self) -> tuple[Mapping[int, SampleReward], dict[str, float]]: ...

    def conversations(self, ids: Sequence[int], step: int) -> list[dict[str, Any]]: ...

    def compare_answers(self, split: str, pairs: Sequence[tuple[int, str, str]]) -> list[bool]: ...

    def forget(self) -> None: ...


def ask(
    ranks: Answerers, benchmark: Benchmark, step: int, samples: int, sampling: SamplingParams
) -> tuple[list[Line], float]:
    """Every question of a benchmark, `samples` times; in rollout mode.

    Returns a line a question, in order, and for how many seconds graders were still busy after the last sample.
    """
    tickets, _ = ranks.generate(benchmark.split, range(benchmark.questions), step, samples, sampling)
    _, grading = ranks.rewards()
    texts = ranks.conversations([ticket.id for ticket in tickets], step)
    ranks.forget()
    lines = [_line(list(group)) for _, group in groupby(texts, lambda text: text["id"] // samples)]
    votes_of = count_votes(lines, lambda pairs: ranks.compare_answers(benchmark.split, pairs))
    for line, votes in zip(lines, votes_of, strict=True):
        line["votes"] = votes
    return lines, grading["timing/non_overlap_rule_reward"]


def ask_all(
    ranks: Answerers,
    benchmarks: Sequence[Benchmark],
    step: int,
    config: Config,
    keep: Callable[[int, str, Sequence[Line]], None],
) -> dict[str, float]:
    """Ask all of a run's benchmarks after `step`, as evaluation.* says; in rollout mode. Responses end as in training.

    `keep` is given the step, the name and the lines of each. Returns metrics.
    """
    rollout, evaluation = config.rollout, config.evaluation
    sampling = SamplingParams(
        temperature=evaluation.temperature,
        max_tokens=evaluation.max_response_length or rollout.max_response_length,
        top_p=evaluation.top_p,
        top_k=evaluation.top_k,
        stop=rollout.stop,
        stop_token_ids=rollout.stop_token_ids,
    )
    metrics: dict[str, float] = {}
    for benchmark in benchmarks:
        lines, _ = ask(ranks, benchmark, step, evaluation.samples, sampling)
        keep(step, benchmark.name, lines)
        metrics |= {f"eval/{benchmark.name}/{name}": value for name, value in measure(lines).items()}
    return metrics


def _line(samples: Sequence[Mapping[str, Any]]) -> Line:
    line = {name: samples[0].get(name) for name in _QUESTION}
    line |= {name: samples[0][name] for name in ("thumbnails",) if name in samples[0]}
    line["samples"] = [{name: sample.get(name) for name in _SAMPLE} for sample in samples]
    line["accuracy"] = sum(sample["cause"] == "correct" for sample in samples) / len(samples)
    return line


def count_votes(lines: Sequence[Line], equal: Equal) -> list[list[dict[str, Any]] | None]:
    """Count each question's answers, the most frequent first; answers that the grader calls equal are one.

    A sample that was cut off, or in which no answer was found, has no vote. All correct answers equal the gold one, and
    so each other, and no wrong one; wrong ones are compared with the first of each other kind. None: the
    grader does not say which answer it read.
    """
    counts: list[Counter[str] | None] = []
    for line in lines:
        wrong = [sample for sample in line["samples"] if sample["cause"] == "wrong"]
        known = all(sample["extracted"] is not None for sample in wrong)
        counts.append(Counter(sample["extracted"].strip() for sample in wrong) if known else None)
    kinds: list[dict[str, int]] = [{} for _ in lines]
    unlike = [list(count or ()) for count in counts]
    while any(unlike):
        pairs = [(row, answers[0], other) for row, answers in enumerate(unlike) for other in answers[1:]]
        alike = {pair for pair, same in zip(pairs, equal(pairs), strict=True) if same}
        for row, answers in enumerate(unlike):
            if answers:
                same = [other for other in answers[1:] if (row, answers[0], other) in alike]
                kinds[row][answers[0]] = sum(counts[row][answer] for answer in (answers[0], *same))
                unlike[row] = [other for other in answers[1:] if other not in same]
    found: list[list[dict[str, Any]] | None] = []
    for line, count, kind in zip(lines, counts, kinds, strict=True):
        if count is None:
            found.append(None)
            continue
        votes = [{"answer": answer, "count": many, "correct": False} for answer, many in kind.items()]
        correct = sum(sample["cause"] == "correct" for sample in line["samples"])
        if correct:
            votes.insert(0, {"answer": line["answer"], "count": correct, "correct": True})
        found.append(sorted(votes, key=lambda vote: -vote["count"]))
    return found


def measure(lines: Sequence[Line]) -> dict[str, float]:
    """Compute the metrics of lines: accuracy, with several samples pass@k and majority@k, lengths and fractions."""
    samples = [sample for line in lines for sample in line["samples"]]
    n = len(lines[0]["samples"])
    # Without rules, which alone judge answers, there is no accuracy.
    judged = any(sample["cause"] != UNJUDGED for sample in samples)
    metrics = (
        {
            "accuracy": sum(sample["cause"] == "correct" for sample in samples) / len(samples),
            "unparsed_fraction": sum(sample["cause"] == "unparsed" for sample in samples) / len(samples),
        }
        if judged
        else {}
    )
    metrics |= {
        "truncated_fraction": sum(sample["finish_reason"] == "length" for sample in samples) / len(samples),
        "response_length_mean": sum(sample["response_tokens"] for sample in samples) / len(samples),
    }
    if n == 1 or not judged:
        return metrics
    ks = powers_of_two(n)
    right = [round(line["accuracy"] * n) for line in lines]
    for k in ks:
        metrics[f"pass_at_{k}"] = _mean(pass_at_k(n, correct, k) for correct in right)
    if all(line["votes"] is not None for line in lines):
        majorities = [_majority(line, n) for line in lines]
        for k in ks:
            metrics[f"majority_at_{k}"] = _mean(majority[k - 1] for majority in majorities)
    return metrics


def _majority(line: Line, n: int) -> list[float]:
    counts = [vote["count"] for vote in line["votes"]]
    correct = next((place for place, vote in enumerate(line["votes"]) if vote["correct"]), None)
    return majority_at_k(counts, correct, n - sum(counts))


def accuracy_interval(lines: Sequence[Line]) -> tuple[float, float]:
    """95 %: Wilson's with one sample a question, else of the mean of questions."""
    if len(lines[0]["samples"]) == 1:
        return wilson(sum(line["accuracy"] == 1 for line in lines), len(lines))
    return clustered([line["accuracy"] for line in lines])


@dataclass(frozen=True)
class Comparison:
    """A model against a baseline, question by question."""

    accuracy: float
    baseline_accuracy: float
    wins: list[tuple[Line, Line]]
    """Questions (the baseline's line, the model's) that the model answers more often."""
    losses: list[tuple[Line, Line]]
    ties: int

    @property
    def p(self) -> float:
        """That the two are equally good."""
        return mcnemar(len(self.wins), len(self.losses))

    def changed(self) -> list[Line]:
        """Return a line for each question that came out differently, in order."""
        verdicts = [(lines, "won") for lines in self.wins] + [(lines, "lost") for lines in self.losses]
        return [
            {
                "verdict": verdict,
                **{name: new.get(name) for name in ("index", "question", "answer")},
                "baseline_accuracy": old["accuracy"],
                "accuracy": new["accuracy"],
                "baseline_responses": [sample["response"] for sample in old["samples"]],
                "responses": [sample["response"] for sample in new["samples"]],
            }
            for (old, new), verdict in sorted(verdicts, key=lambda one: one[0][1]["index"])
        ]


Asked = list[tuple[int, str, str]]
"""Index, question and gold answer of each."""


def asked(lines: Sequence[Line]) -> Asked:
    """Name what an evaluation was about."""
    return [(line["index"], line["question"], line["answer"]) for line in lines]


def check_asked(baseline: Asked, model: Asked) -> None:
    """Raises ValueError when the two are not the same."""
    if baseline != model:
        same = sum(a == b for a, b in zip(baseline, model, strict=False))
        raise ValueError(
            f"baseline: it was asked {len(baseline)} questions and this model {len(model)}, of which {same} are the "
            "same; evaluate both on the same file with the same limit and seed"
        )


def compare(baseline: Sequence[Line], lines: Sequence[Line]) -> Comparison:
    """Raises ValueError when the two were not asked the same questions."""
    check_asked(asked(baseline), asked(lines))
    pairs = list(zip(baseline, lines, strict=True))
    wins = [(old, new) for old, new in pairs if new["accuracy"] > old["accuracy"]]
    losses = [(old, new) for old, new in pairs if new["accuracy"] < old["accuracy"]]
    return Comparison(
        _mean(line["accuracy"] for line in lines),
        _mean(line["accuracy"] for line in baseline),
        wins,
        losses,
        len(pairs) - len(wins) - len(losses),
    )


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
