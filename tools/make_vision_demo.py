"""Make what configs/demo_vlm_cpu.yaml needs: pictures of coloured squares, and a tiny Qwen2.5-VL that answers blindly.

    python tools/make_vision_demo.py --output models/demo-vlm

The model is random but for a short fit to answers that have nothing to do with the pictures they follow: it names one
of four colours, and the right one by chance. Its answers can become right only by looking. `blind_train.jsonl` and
`blind_test.jsonl` ask the same questions of a grey picture.
"""

import argparse
import json
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

COLOURS = {"red": (210, 40, 40), "green": (40, 170, 60), "blue": (50, 70, 210), "yellow": (220, 200, 50)}
QUESTION = "<image>Which colour?"
SIDE = 56
SPLITS = {"train": 512, "test": 128}
FILES = ("config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json", "train.jsonl", "test.jsonl")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory to make; left alone when complete")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60, help="of the fit to random answers")
    args = parser.parse_args(argv)
    from tools.make_demo_model import from_scratch

    from_scratch(args.output.absolute(), FILES, lambda directory: write(directory, args.seed, args.steps))


def write(directory: Path, seed: int, steps: int) -> None:
    for number, (split, count) in enumerate(SPLITS.items()):
        write_pictures(directory, split, count, random.Random(2 * seed + number))
    write_model(directory, seed)
    fit(directory, seed, steps)


def write_pictures(directory: Path, split: str, count: int, draw: random.Random) -> None:
    """Write a split's pictures and its two files of questions."""
    from PIL import Image

    (directory / split).mkdir()
    Image.new("RGB", (SIDE, SIDE), (128, 128, 128)).save(directory / "grey.png")
    seeing, blind = [], []
    for number in range(count):
        colour = list(COLOURS)[number % len(COLOURS)]
        picture = f"{split}/{number:04d}.png"
        square(COLOURS[colour], draw).save(directory / picture)
        row = {"problem": QUESTION, "answer": colour}
        seeing.append(row | {"images": [picture]})
        blind.append(row | {"images": ["grey.png"]})
    for name, rows in ((split, seeing), (f"blind_{split}", blind)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def square(colour: tuple[int, int, int], draw: random.Random):
    """Return a picture of a square, somewhere on a grey ground, in a shade of the colour."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE), (draw.randrange(80, 180),) * 3)
    side = draw.randrange(20, 33)
    left, top = draw.randrange(SIDE - side), draw.randrange(SIDE - side)
    shade = tuple(min(255, max(0, part + draw.randrange(-25, 26))) for part in colour)
    ImageDraw.Draw(image).rectangle((left, top, left + side, top + side), fill=shade)
    return image


def write_model(directory: Path, seed: int) -> None:
    """Write a random model of three million parameters, with a tokenizer of bytes."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from tests.tiny_models import IMAGE_TOKENS, write_processor
    from tests.tiny_tokenizer import make_tokenizer

    hidden = 256
    text = {
        "vocab_size": 515,
        "hidden_size": hidden,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10]},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    tower = {"depth": 2, "hidden_size": 128, "num_heads": 4, "intermediate_size": 256, "out_hidden_size": hidden}
    tower |= {"window_size": 56, "fullatt_block_indexes": [1]}
    torch.manual_seed(seed)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=tower, **IMAGE_TOKENS))
    model.save_pretrained(directory)
    write_processor(directory)
    make_tokenizer(directory, vision=True)


def fit(directory: Path, seed: int, steps: int, batch: int = 32) -> None:
    """Teach the decoder to answer with a colour, whichever the picture shows."""
    import torch
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

    from spmd_rl.config.data_config import DataConfig
    from spmd_rl.data.image_reader import ImageReader, parts
    from spmd_rl.data.pictures import Picture
    from spmd_rl.models.model_shape import read_model_shape

    tokenizer = AutoTokenizer.from_pretrained(directory)
    vision = read_model_shape(directory).vision
    assert vision is not None
    reader = ImageReader(str(directory), vision, DataConfig())
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    model.model.visual.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts(QUESTION)}], add_generation_prompt=True, tokenize=False
    )
    answers = [tokenizer.encode(f"{colour}<|im_end|>", add_special_tokens=False) for colour in COLOURS]
    longest, draw = max(map(len, answers)), random.Random(seed)
    for step in range(steps):
        pictures = [
            Picture(path=str(directory / f"train/{draw.randrange(SPLITS['train']):04d}.png")) for _ in range(batch)
        ]
        pixels, grids = reader.patches(pictures)
        prompt = reader.expanded(tokenizer.encode(asked, add_special_tokens=False), grids[:1])
        chosen = [draw.choice(answers) for _ in range(batch)]
        tokens = torch.tensor([prompt + answer + [0] * (longest - len(answer)) for answer in chosen])
        labels = torch.tensor([[-100] * len(prompt) + answer + [-100] * (longest - len(answer)) for answer in chosen])
        loss = model(
            input_ids=tokens,
            labels=labels,
            pixel_values=torch.from_numpy(pixels),
            image_grid_thw=torch.tensor(grids),
            mm_token_type_ids=(tokens == vision.image_token).int(),
        ).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == steps - 1:
            print(f"fit {step + 1}/{steps}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(directory)


if __name__ == "__main__":
    main(sys.argv[1:])
