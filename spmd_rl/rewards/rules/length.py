"""Rules about how long a response is and how often it repeats itself; they don't look at the answer."""

from spmd_rl.rewards.grade import RewardSample


def overlong(sample: RewardSample, buffer_tokens: int = 0, limit_tokens: int = 0, factor: float = 1.0) -> float:
    """0.0 up to `buffer_tokens` before the limit, from there falling evenly to -factor at the limit
    (soft overlong punishment of DAPO, https://arxiv.org/abs/2503.14476, equation 13).

    `limit_tokens` 0: where responses are cut off (rollout.max_response_length); `buffer_tokens` 0: a quarter of that.
    Raises a ValueError for a sample without a length, or a buffer larger than the limit.
    """
    limit = _limit("overlong", sample, limit_tokens)
    buffer = buffer_tokens or limit // 4 or 1
    if buffer > limit:
        raise ValueError(f"overlong: buffer_tokens = {buffer} is more than the limit of {limit} tokens; lower it")
    beyond = min(sample.tokens - (limit - buffer), buffer)
    return -factor * beyond / buffer if beyond > 0 else 0.0


def length(sample: RewardSample, limit_tokens: int = 0) -> float:
    """Minus the used part of the limit, from 0.0 to -1.0; with a small weight it makes a model brief.

    `limit_tokens` 0: where responses are cut off (rollout.max_response_length).
    """
    return -min(1.0, sample.tokens / _limit("length", sample, limit_tokens))


def repetition(sample: RewardSample, ngram: int = 20) -> float:
    """Minus the part of the response's runs of `ngram` tokens that occurred before: 0.0 without repetition, towards
    -1.0 for a loop. Of words, where the sample has no tokens."""
    units = sample.response_ids or sample.response.split()
    runs = [tuple(units[start : start + ngram]) for start in range(len(units) - ngram + 1)]
    return -(1.0 - len(set(runs)) / len(runs)) if runs else 0.0


def _check_overlong(buffer_tokens: int = 0, limit_tokens: int = 0, factor: float = 1.0) -> None:
    if buffer_tokens < 0 or limit_tokens < 0 or factor < 0:
        raise ValueError("buffer_tokens, limit_tokens and factor are 0 or more")
    if limit_tokens and buffer_tokens > limit_tokens:
        raise ValueError(f"buffer_tokens = {buffer_tokens} is more than limit_tokens = {limit_tokens}")


def _check_repetition(ngram: int = 20) -> None:
    if ngram < 1:
        raise ValueError(f"ngram = {ngram} should be 1 or more")


def _limit(rule: str, sample: RewardSample, limit_tokens: int) -> int:
    if sample.response and not sample.tokens:
        raise ValueError(f"{rule}: the sample does not say how many tokens its response has")
    limit = limit_tokens or sample.response_limit
    if limit <= 0:
        raise ValueError(f"{rule}: it is not known after how many tokens responses are cut off; give limit_tokens")
    return limit


overlong.check = _check_overlong
repetition.check = _check_repetition
