"""Turn a directory of block-scaled FP8 weights, as DeepSeek-V3 and R1 are published, into one of bfloat16.

    python tools/dequantize_fp8.py models/DeepSeek-R1 --output models/DeepSeek-R1-BF16

A run reads such a directory too, and multiplies whenever it loads: this is for those who load it often, or elsewhere.

A weight of float8 is multiplied by the number that `NAME_scale_inv` has for its block of 128 x 128 (config.json says
the size), and rounded to bfloat16; everything else stays as it is. Layers for the prediction of several tokens
(num_nextn_predict_layers) are left out: they are not trained here. File by file, a few rows at a time: 671 billion
parameters take 1.3 TB of disk and little memory. The same command continues where it was interrupted; config.json comes
last, so that what has one is whole. Ends with 2 where something is wrong with what was asked for.
"""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402

from spmd_rl.weights.files.fp8_blocks import FP8, SCALE, dequantized  # noqa: E402
from spmd_rl.weights.files.hf_extras import copy_companions  # noqa: E402
from spmd_rl.weights.files.hf_reader import DTYPES, INDEX, SINGLE  # noqa: E402
from spmd_rl.weights.files.safetensors_files import SafetensorsFiles  # noqa: E402
from spmd_rl.weights.transfer.boxes import Box  # noqa: E402

ROW_BLOCKS = 8
"""Rows of blocks that are in memory at a time."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def main(argv: list[str]) -> int:
    """Convert; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("directory", type=Path, help="Hugging Face directory in FP8")
    parser.add_argument("--output", type=Path, required=True, help="directory to write, new or begun by this command")
    options = parser.parse_args(argv)
    try:
        convert(options.directory, options.output)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def convert(source: Path, output: Path) -> None:
    """Write the directory in bfloat16. Raises ValueError where it is not one of block-scaled FP8."""
    config = read_config(source)
    rows, columns = block_size(source, config)
    layers = int(config["num_hidden_layers"])
    where = weight_map(source)
    kept = {name: file for name, file in where.items() if not name.endswith(SCALE) and not is_extra(name, layers)}
    if (output / "config.json").exists():
        raise ValueError(f"--output = {output}: there is a model already; name another directory")
    output.mkdir(parents=True, exist_ok=True)
    files = sorted(set(kept.values()))
    total = 0
    for number, file in enumerate(files, 1):
        names = [name for name, one in kept.items() if one == file]
        total += convert_file(source, output, file, names, where, (rows, columns))
        print(f"{file}: {len(names)} tensors ({number} of {len(files)} files)", flush=True)
    (output / INDEX).unlink(missing_ok=True)
    if files != [SINGLE]:
        index = {"metadata": {"total_size": total}, "weight_map": kept}
        (output / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if extra := sum(is_extra(name, layers) for name in where):
        print(
            f"left out: {extra} tensors of layers for the prediction of several tokens, from model.layers.{layers} on"
        )
    finish(source, output, config)
    print(f"{output} is in bfloat16", flush=True)


def finish(source: Path, output: Path, config: dict[str, object]) -> None:
    """Write tokenizer and the like, and last config.json, which no longer speaks of FP8."""
    staged = output / "companions.partial"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    copy_companions(source, staged)
    (staged / "config.json").unlink()
    for file in staged.iterdir():
        file.replace(output / file.name)
    staged.rmdir()
    config = {name: value for name, value in config.items() if name != "quantization_config"}
    config |= {"torch_dtype": "bfloat16"} | (
        {"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in config else {}
    )
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_config(source: Path) -> dict[str, object]:
    """Return config.json."""
    file = source / "config.json"
    if not file.is_file():
        raise ValueError(f"{source}: there is no config.json in it; name a Hugging Face directory")
    return json.loads(file.read_text(encoding="utf-8"))


def block_size(source: Path, config: Mapping[str, object]) -> tuple[int, int]:
    """Return rows and columns of a block."""
    quantized = config.get("quantization_config")
    if not isinstance(quantized, dict) or quantized.get("quant_method") != "fp8":
        found = quantized.get("quant_method") if isinstance(quantized, dict) else None
        met = f"quantization_config in its config.json says {found or 'nothing'}"
        raise ValueError(f"{source}: {met}; this reads quant_method fp8 with weight_block_size, as DeepSeek-V3 has it")
    rows, columns = quantized.get("weight_block_size") or (128, 128)
    return int(rows), int(columns)


def weight_map(source: Path) -> dict[str, str]:
    """Return tensor -> file."""
    if (source / INDEX).is_file():
        return dict(json.loads((source / INDEX).read_text(encoding="utf-8"))["weight_map"])
    if not (source / SINGLE).is_file():
        raise ValueError(f"{source}: there is neither {INDEX} nor {SINGLE} in it; fetch the directory again")
    with safe_open(source / SINGLE, framework="pt") as handle:
        return dict.fromkeys(handle.keys(), SINGLE)


def is_extra(name: str, layers: int) -> bool:
    """Return True for a tensor of a layer behind the model's own."""
    found = _LAYER.match(name)
    return found is not None and int(found[1]) >= layers


def convert_file(
    source: Path, output: Path, file: str, names: list[str], where: Mapping[str, str], block: tuple[int, int]
) -> int:
    """Write one file, unless it is there; return the bytes of its tensors."""
    with ExitStack() as opened:
        handles = {file: opened.enter_context(safe_open(source / file, framework="pt"))}
        slices = {name: handles[file].get_slice(name) for name in names}
        shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        dtypes = {
            name: torch.bfloat16 if part.get_dtype() == FP8 else DTYPES[part.get_dtype()]
            for name, part in slices.items()
        }
        partial = f"{file}.partial"
        writer = SafetensorsFiles(output, {partial: names}, shapes, dtypes)
        size = sum(writer.bytes_of.values())
        if (output / file).exists():
            return size
        if shutil.disk_usage(output).free < size:
            raise ValueError(f"--output = {output}: {file} takes {size / 2**30:.1f} GiB, and less is free on its disk")
        (output / partial).unlink(missing_ok=True)
        writer.create()
        for name, part in slices.items():
            if part.get_dtype() != FP8:
                writer.write(Box(name, (0,) * len(shapes[name]), shapes[name]), part[...])
                continue
            scale = where.get(name + SCALE)
            if scale is None:
                raise ValueError(f"{source}: {name} is in FP8 and has no {name + SCALE}; fetch the directory again")
            if scale not in handles:
                handles[scale] = opened.enter_context(safe_open(source / scale, framework="pt"))
            scales = handles[scale].get_tensor(name + SCALE).float()
            height, width = shapes[name]
            for top in range(0, height, block[0] * ROW_BLOCKS):
                bottom = min(height, top + block[0] * ROW_BLOCKS)
                rows = scales[top // block[0] : -(-bottom // block[0])]
                values = dequantized(part[top:bottom], rows, block)
                writer.write(Box(name, (top, 0), (bottom - top, width)), values)
        writer.close()
    (output / partial).rename(output / file)
    return size


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
