"""The response is the answer, nothing more and nothing less."""

from spmd_rl.rewards.grade import RewardSample, RuleResult


def exact(sample: RewardSample) -> RuleResult:
    """1.0 when the whole response equals the answer, white space at both ends aside."""
    response = sample.response.strip()
    if response == sample.answer.strip():
        return RuleResult(1.0, "correct", response)
    if not response:
        return RuleResult(0.0, "unparsed", None)
    return RuleResult(0.0, "truncated" if sample.finish_reason == "length" else "wrong", response)
