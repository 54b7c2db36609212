"""Names of data sources."""

import re
from pathlib import Path

FORMATS = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
ARITHMETIC = "arithmetic"
REASONING_GYM = "reasoning_gym:"

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def is_made(source: str) -> bool:
    """Return True where problems are generated, and so have held-out ones of their own."""
    return source == ARITHMETIC or source.startswith(REASONING_GYM)


def is_hub_name(source: str) -> bool:
    """Return True for what can be a dataset on the Hugging Face hub where it is not on this machine: owner/name."""
    return not Path(source).exists() and Path(source).suffix not in FORMATS and bool(_HUB_NAME.fullmatch(source))
