"""Run every program by one command: `spmd-rl grpo --nproc_per_node 2 --config FILE`, `spmd-rl chat --model DIR`, ...

A program that ranks run together is started as torchrun does (runtime/torchrun.py) where torchrun's options are among
the words; without them, and inside torchrun, it is this process.
"""

import runpy
import sys
from textwrap import fill

from spmd_rl.config.command_line import TORCHRUN
from spmd_rl.config.shipped import folder, shipped_names
from spmd_rl.distributed.terminal_lines import end_with_reader
from spmd_rl.errors import did_you_mean
from spmd_rl.runtime.torchrun import main as torchrun

RANKS = {
    "grpo": "train with GRPO and its kin",
    "ppo": "train with PPO and a critic",
    "evaluate": "measure a model on benchmarks",
    "chat": "talk with a model",
    "doctor": "check a machine or a cluster before a run",
}
ALONE = {
    "plan": "what moves between training and rollout in a layout, without a device",
    "verify_resume": "does a run go on exactly after a kill?",
}
TOOLS = {
    "plot": ("plot_run", "curves of runs, as pictures or as text"),
    "insights": ("find_insights", "moments of self-correction in a run's samples"),
    "convert": ("convert_checkpoint", "Hugging Face directories to Megatron checkpoints and back"),
    "preprocess": ("preprocess_data", "prompts to token ids, once"),
    "from_mindspeed": ("from_mindspeed", "a YAML file of MindSpeed-RL, verl or TRL to one of ours"),
    "trace": ("summarize_trace", "where the time of profiled steps went"),
    "push": ("push_to_hub", "a model to the Hugging Face hub"),
}


def main() -> None:
    """Run the program that the first word names, with the words after it."""
    name, words = (sys.argv[1:2] or [""])[0].replace("-", "_"), sys.argv[2:]
    if name in ("", "help", "__help", "_h"):
        end_with_reader()
        print(usage())
    elif name in TOOLS:
        tool = folder("tools") / f"{TOOLS[name][0]}.py"
        sys.argv = [str(tool), *words]
        runpy.run_path(str(tool), run_name="__main__")
    elif name in RANKS | ALONE:
        ours, theirs = split_torchrun(words)
        if name in RANKS and theirs:
            return torchrun([*theirs, "-m", f"spmd_rl.{name}", *ours])
        sys.argv = [f"spmd-rl {name}", *words]
        runpy.run_module(f"spmd_rl.{name}", run_name="__main__", alter_sys=True)
    else:
        known = (*RANKS, *ALONE, *TOOLS)
        print(f"spmd-rl {name}: there is no such program; {did_you_mean(name, known)}", file=sys.stderr)
        sys.exit(2)


def split_torchrun(words: list[str]) -> tuple[list[str], list[str]]:
    """Return the program's words, and torchrun's options with their values."""
    ours: list[str] = []
    theirs: list[str] = []
    place = ours
    for word in words:
        if word.startswith("--"):
            place = theirs if word[2:].partition("=")[0].replace("-", "_") in TORCHRUN else ours
        place.append(word)
    return ours, theirs


def usage() -> str:
    """Return what there is to run, and what is shipped with it."""
    lines = ["spmd-rl PROGRAM [torchrun's options] [--config FILE] [--section.setting VALUE ...]", ""]
    programs = RANKS | ALONE | {name: what for name, (_, what) in TOOLS.items()}
    lines += [f"  {name:14} {what}" for name, what in programs.items()]
    lines += ["", "spmd-rl PROGRAM --help says more. Shipped, by name:"]
    for option, place in (("--config", ""), ("--data.source", "datasets")):
        names = ", ".join(shipped_names(place))
        lines.append(fill(names, 100, initial_indent=f"  {option:14} ", subsequent_indent=" " * 17))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
