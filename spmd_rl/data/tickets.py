"""The nouns rank 0 knows a sample by; tokens stay on the rank that made them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ticket:
    """One sample as rank 0 knows it: its group, its lengths, why it ended."""

    id: int
    """group * samples_per_prompt + the sample's number in it; unique within the step."""
    group: int
    """Of the samples of one prompt: the prompt's index within the step."""
    prompt_tokens: int
    response_tokens: int
    loss_tokens: int
    """Those of the response that the policy wrote, and is trained on."""
    finish_reason: str
    """Either "stop" (an end token or stop string) or "length" (the response limit)."""
    policy_version: int = 0
    """The step whose weights wrote it."""
    owner: int = 0
    """The rank that made it, and holds it."""
    patches: int = 0
    """Of the images that its prompt shows."""
    image_tokens: int = 0
    """Those of the prompt that stand for images."""

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
