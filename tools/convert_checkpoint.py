"""Convert Hugging Face directories to Megatron checkpoints and back, without holding a model in memory.

    python tools/convert_checkpoint.py to-megatron --hf models/qwen3-8b --output checkpoints/qwen3-8b --tensor 4
    python tools/convert_checkpoint.py to-hf --checkpoint runs/one --output models/one --select best
    python tools/convert_checkpoint.py to-hf --checkpoint runs/one/checkpoints/step_000100 --output models/one-100
    python tools/convert_checkpoint.py verify --hf models/qwen3-8b --checkpoint checkpoints/qwen3-8b

Under `torchrun --nproc_per_node N` the processes share the work. The same command continues an interrupted conversion.
--tensor, --pipeline and so on decide how the checkpoint is cut into files: a training run at that layout reads only its
own ones, and every other layout can read it too. Ends with 0; with 1 when what was written isn't what was read; with 2
when something is wrong with what was asked for (under torchrun always with 1).
"""

import argparse
import math
import os
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# What the library calls the knobs -> what they are called here.
FLAGS = (
    (re.compile(r"\bparallel\.(\w+)"), lambda found: "--" + found[1].replace("_", "-")),
    (re.compile(r"\bmodel\.path\b"), lambda found: "--hf"),
    (re.compile(r"\btensor parallel size\b"), lambda found: "--tensor"),
    (re.compile(r"^output "), lambda found: "--output "),
    (re.compile(r"\bwith force$"), lambda found: "with --force"),
    (re.compile(r"\bwith a dtype$"), lambda found: "with --dtype"),
    (re.compile(r"\(hf-config\)"), lambda found: "with --hf-config"),
)


def main(argv: list[str]) -> int:
    args = parse(argv)
    many = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if many:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    try:
        return run(args)
    except (ValueError, OSError) as error:
        print(f"error: {in_flags(str(error))}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr, flush=True)
        return 130
    finally:
        if many:
            dist.destroy_process_group()


def run(args: argparse.Namespace) -> int:
    import torch

    from spmd_rl.weights.files import convert

    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype) if getattr(args, "dtype", None) else None
    bar = Bar()
    progress = convert.Progress(bar.started, bar.advanced)
    try:
        if args.command == "verify":
            difference = convert.compare(args.hf, args.checkpoint, progress=progress)
            if difference is not None:
                raise convert.DifferenceError(difference)
        else:
            common = {"dtype": dtype, "force": args.force, "verify": args.verify, "progress": progress}
            if args.command == "to-megatron":
                labels = args.labels if args.head == "value" else 0
                convert.to_megatron(args.hf, args.output, layout(args), labels=labels, **common)
            else:
                for checkpoint, companions, output in exports(args):
                    convert.to_hf(checkpoint, output, hf=companions, **common)
    except convert.DifferenceError as error:
        bar.finish()
        print(f"different: {error}", file=sys.stderr, flush=True)
        return 1
    bar.finish()
    if bar.shown:
        print(f"{args.checkpoint} is {args.hf}" if args.command == "verify" else f"{args.output} is complete")
    return 0


def exports(args: argparse.Namespace) -> list[tuple[Path, Path | None, Path]]:
    """(checkpoint, directory with its config.json, output) of each conversion: one, or of a run's every checkpoint."""
    from spmd_rl.config.config import CheckpointConfig
    from spmd_rl.config.loading import read_settings
    from spmd_rl.config.model_directory import find_model
    from spmd_rl.runlog.checkpoint_store import CheckpointStore

    store = CheckpointStore(args.checkpoint / "checkpoints", CheckpointConfig())
    saved = store.found()
    if not saved:
        if args.select != "newest":
            raise ValueError(f"--select {args.select}: {args.checkpoint} is not a run with checkpoints; name one")
        if args.hf_config or not (args.checkpoint / "state.json").is_file():
            return [(args.checkpoint, args.hf_config, args.output)]
        found = find_model("--checkpoint", str(args.checkpoint))
        return [(Path(found.weights), Path(found.config), args.output)]
    chosen = saved if args.select == "all" else saved[-1:]
    if args.select == "best":
        metric = args.metric or read_settings(args.checkpoint / "config.yaml").get("checkpoint.keep_best")
        best = CheckpointStore(store.directory, CheckpointConfig(keep_best=metric)).best(saved)
        if best is None:
            way = "name one with --metric, such as eval/gsm8k/accuracy, or -NAME for the smallest"
            raise ValueError(f"--select best: no checkpoint of {args.checkpoint} has the metric {metric}; {way}")
        chosen = [best]
    outputs = [args.output / one.path.name if args.select == "all" else args.output for one in chosen]
    models = [find_model("--checkpoint", str(one.path)) for one in chosen]
    return [(Path(m.weights), args.hf_config or Path(m.config), o) for m, o in zip(models, outputs, strict=True)]


def layout(args: argparse.Namespace):
    """The smallest training layout of these sizes."""
    from spmd_rl.distributed.layout import TrainLayout

    experts = args.expert * args.expert_tensor
    data = experts // math.gcd(args.tensor, experts) if experts > 0 and args.tensor > 0 else 1
    return TrainLayout(
        args.tensor,
        args.pipeline,
        data,
        expert=args.expert,
        expert_tensor=args.expert_tensor,
        virtual=args.virtual,
        layers_per_stage=tuple(args.layers_per_stage),
    )


def in_flags(message: str) -> str:
    """An error of the library on one line and in this tool's words."""
    for pattern, flag in FLAGS:
        message = pattern.sub(flag, message)
    return "; ".join(line.strip() for line in message.splitlines() if line.strip())


class Bar:
    """Show how far the first process is: a bar on a terminal, else a line every ten seconds."""

    def __init__(self) -> None:
        self.shown = os.environ.get("RANK", "0") == "0"
        self.bar = None

    def started(self, what: str, done: int, total: int) -> None:
        self.finish()
        if not self.shown:
            return
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        self.what = f"{what} (process 0 of {processes})" if processes > 1 else what
        self.done, self.total, self.since, self.began, self.said = done, total, done, time.monotonic(), time.monotonic()
        if done:
            print(f"{self.what}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB were done before; going on", flush=True)
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(desc=self.what, initial=done, total=total, unit="B", unit_scale=True)

    def advanced(self, more: int) -> None:
        if not self.shown:
            return
        self.done += more
        if self.bar is not None:
            self.bar.update(more)
        elif time.monotonic() - self.said > 10:
            self.said = time.monotonic()
            self.line()

    def finish(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        elif self.shown and hasattr(self, "done"):
            self.line()
        if hasattr(self, "done"):
            del self.done

    def line(self) -> None:
        seconds = max(time.monotonic() - self.began, 1e-9)
        print(
            f"{self.what}: {self.done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB, "
            f"{(self.done - self.since) / 1e6 / seconds:,.0f} MB/s",
            flush=True,
        )


def parse(argv: list[str]) -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    commands = parser.add_subparsers(dest="command", required=True)

    there = commands.add_parser("to-megatron", help="a Hugging Face directory to a Megatron checkpoint")
    there.add_argument("--hf", type=Path, required=True, help="directory with config.json and *.safetensors")
    there.add_argument("--tensor", type=int, default=1, help="tensor-parallel size (TP)")
    there.add_argument("--pipeline", type=int, default=1, help="stages of layers")
    there.add_argument("--expert", type=int, default=1, help="ranks that share the experts of a layer")
    there.add_argument("--expert-tensor", type=int, default=1, help="ranks that share each single expert")
    there.add_argument("--virtual", type=int, default=1, help="parts of each pipeline stage")
    there.add_argument("--layers-per-stage", type=int, nargs="+", default=[], help="where they don't divide evenly")
    there.add_argument(
        "--head",
        choices=("keep", "value"),
        default="keep",
        help="value: a score head, all zero, in place of the language-model head: a critic or reward model to train",
    )
    there.add_argument("--labels", type=int, default=1, help="rows of that score head")

    back = commands.add_parser("to-hf", help="a Megatron checkpoint to a Hugging Face directory")
    back.add_argument(
        "--checkpoint", type=Path, required=True, help="converted by this tool, a run, or one of its checkpoints"
    )
    back.add_argument("--select", choices=("newest", "best", "all"), default="newest", help="of a run; all: below DIR")
    back.add_argument(
        "--metric", help="best by this metric; with a minus, the smallest (default: checkpoint.keep_best)"
    )
    back.add_argument(
        "--hf-config",
        type=Path,
        help="directory with config.json and tokenizer (default: hf/ in the checkpoint)",
    )
    for command in (there, back):
        command.add_argument("--output", type=Path, required=True, help="directory to make")
        command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: as they are")
        command.add_argument("--force", action="store_true", help="replace what is there, when the new one is complete")
        command.add_argument("--verify", action="store_true", help="read all again and compare it bit for bit")

    verify = commands.add_parser("verify", help="compare a Hugging Face directory with a Megatron checkpoint of it")
    verify.add_argument("--hf", type=Path, required=True)
    verify.add_argument("--checkpoint", type=Path, required=True)
    args = parser.parse_args(argv)
    if args.command == "to-megatron" and args.labels < 1:
        parser.error(f"--labels = {args.labels}: a score head has at least 1 row")
    return args


if __name__ == "__main__":
    from spmd_rl.runtime.process import leave

    # What torch has started for several processes is not always ended when Python takes itself apart: it then aborts.
    leave(main(sys.argv[1:]))
