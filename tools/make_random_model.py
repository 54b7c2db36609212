"""A random model of any supported size, for trying layouts: `python tools/make_random_model.py --output DIR`.

Writes config.json and model.safetensors, tensor by tensor. `--config FILE`: a config.json to go by; by default
Qwen2.5-0.5B's sizes.
"""

import argparse
import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

QWEN2_5_0_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 151645,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory to make")
    parser.add_argument("--config", type=Path, help="a config.json; default: Qwen2.5-0.5B's")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.output.exists() and any(chosen.output.iterdir()):
        sys.exit(f"--output {chosen.output}: it is not empty; name a new directory")
    import torch

    from spmd_rl.models.model_shape import read_model_shape
    from spmd_rl.weights.families import hf_tensors
    from spmd_rl.weights.files.hf_reader import SINGLE
    from spmd_rl.weights.files.safetensors_files import SafetensorsFiles
    from spmd_rl.weights.transfer.boxes import whole

    config = json.loads(chosen.config.read_text(encoding="utf-8")) if chosen.config else QWEN2_5_0_5B
    chosen.output.mkdir(parents=True, exist_ok=True)
    (chosen.output / "config.json").write_text(
        json.dumps(config | {"dtype": chosen.dtype}, indent=2) + "\n", encoding="utf-8"
    )
    sizes = hf_tensors(read_model_shape(chosen.output))
    dtype = getattr(torch, chosen.dtype)
    files = SafetensorsFiles(chosen.output, {SINGLE: list(sizes)}, sizes, dict.fromkeys(sizes, dtype))
    files.create()
    generator = torch.Generator().manual_seed(chosen.seed)
    for name, size in sizes.items():
        values = torch.randn(size, generator=generator) * (0.02 if len(size) > 1 else 0.1)
        files.write(whole(name, size, name).box, values + 1.0 if "norm" in name else values)
    files.close()
    print(f"{chosen.output}: {sum(math.prod(size) for size in sizes.values()) / 1e6:.0f} million parameters")


if __name__ == "__main__":
    main()
