"""Read what config.json says of float8 weights with a scale for each block, as DeepSeek-V3 and R1 are published."""

import json
from pathlib import Path


def _content(directory: Path) -> dict[str, object]:
    try:
        content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def block_size(directory: Path) -> tuple[int, int] | None:
    """Return rows and columns of a block, of which config.json speaks; None where it speaks of none."""
    quantized = _content(directory).get("quantization_config")
    if not isinstance(quantized, dict) or quantized.get("quant_method") != "fp8":
        return None
    rows, columns = quantized.get("weight_block_size") or (128, 128)
    return int(rows), int(columns)


def export_notes(directory: Path) -> list[str]:
    """Return what is in a model's directory, and will not be in what a run exports of it."""
    said, block = [], block_size(directory)
    if block is not None:
        said.append(
            f"model.path: its float8 weights are multiplied by the scales of their blocks of {block[0]} x {block[1]} "
            "as they are read; vLLM and what is exported have them without float8"
        )
    if layers := _content(directory).get("num_nextn_predict_layers"):
        said.append(
            f"model.path: num_nextn_predict_layers = {layers}: layers that predict several tokens are neither trained "
            "nor exported; config.json of what is exported says 0"
        )
    return said
