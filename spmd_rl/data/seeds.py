"""Seeds that depend on what is drawn, never on which rank draws it."""

import hashlib


def sample_seed(run_seed: int, step: int, prompt: int, sample: int) -> int:
    """The seed of one sample: 31 bits, the same on every machine, world size and restart."""
    return derived_seed("sample", run_seed, step, prompt, sample)


def derived_seed(purpose: str, *numbers: int) -> int:
    """31 bits from a purpose and numbers; different purposes give unrelated seeds."""
    text = ":".join([purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1
