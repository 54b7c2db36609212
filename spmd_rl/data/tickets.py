"""The nouns rank 0 knows a sample by; tokens stay on the rank that made them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ticket:
    """What rank 0 knows of one sample: who it is, who holds its tokens, how long it is, why it ended."""

    id: int
    """prompt * samples_per_prompt + sample; unique within the step."""
    prompt: int
    """Index of the prompt within the step."""
    sample: int
    """Index of the sample within its prompt's group."""
    owner: int
    """Global rank that holds the tokens and log-probabilities."""
    prompt_tokens: int
    response_tokens: int
    finish_reason: str
    """Either "stop" (an end token or stop string) or "length" (the response limit)."""

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens


UNJUDGED = "unjudged"
"""The cause of a sample that no rule has looked at: reward models alone scored it."""


@dataclass(frozen=True)
class SampleReward:
    """A sample's reward and why it got it."""

    id: int
    reward: float
    """Sum over the rules of weight * score, and over the reward models of weight * normalised score."""
    cause: str
    """correct, wrong, unparsed, truncated, timeout or crash: that of the first rule that judges the answer.
    UNJUDGED without rules."""
    scores: dict[str, float]
    """Name of a rule or reward model -> unweighted score, as it came."""
    extracted: str | None = None
    """The answer that the rule which gave the cause found in the response; it stays on the rank that graded."""
