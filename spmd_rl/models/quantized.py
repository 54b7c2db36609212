"""Read what config.json says of float8 weights with a scale for each block, as DeepSeek-V3 and R1 are published."""

import json
from pathlib import Path


def block_size(directory: Path) -> tuple[int, int] | None:
    """Return rows and columns of a block, of which config.json speaks; None where it speaks of none."""
    try:
        quantized = json.loads((directory / "config.json").read_text(encoding="utf-8")).get("quantization_config")
    except (OSError, ValueError):
        return None
    if not isinstance(quantized, dict) or quantized.get("quant_method") != "fp8":
        return None
    rows, columns = quantized.get("weight_block_size") or (128, 128)
    return int(rows), int(columns)
