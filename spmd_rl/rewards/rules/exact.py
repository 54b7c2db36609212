"""The response is the answer, nothing more and nothing less."""

from spmd_rl.rewards.grade import Grade, RewardSample


def exact(sample: RewardSample) -> Grade:
    """1.0 when the whole response equals the answer, white space at both ends aside."""
    response = sample.response.strip()
    if response == sample.answer.strip():
        return Grade(1.0, "correct", response)
    if not response:
        return Grade(0.0, "unparsed", None)
    return Grade(0.0, "truncated" if sample.finish_reason == "length" else "wrong", response)
