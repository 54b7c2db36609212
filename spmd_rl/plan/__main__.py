"""A dry run for a cluster you don't have: `python -m spmd_rl.plan --config FILE [--world-size N] [--section.key X]`.

Reads the configuration and the model's config.json, nothing else, and needs no device. The config.json of the models
of configs/ are shipped: they are planned before anything is downloaded.
"""

import argparse
import json
import sys
from pathlib import Path

from spmd_rl.analysis.memory_picture import draw_memory
from spmd_rl.config.check import check
from spmd_rl.config.loading import load_config
from spmd_rl.config.machine_sizes import with_machine_sizes
from spmd_rl.config.model_directory import sizes_directory, with_local_models
from spmd_rl.config.names import Phase
from spmd_rl.distributed.layout import RolloutLayout, TrainLayout
from spmd_rl.distributed.terminal_lines import end_with_reader
from spmd_rl.errors import Problem, refuse
from spmd_rl.estimate.micro_batch import Lengths
from spmd_rl.estimate.rank_memory import PARTS
from spmd_rl.models.model_shape import read_model_shape
from spmd_rl.plan.case import Case, Json, fewest_ranks
from spmd_rl.plan.compare import as_the_run, compare
from spmd_rl.plan.judgement import judgement
from spmd_rl.plan.memory import memory
from spmd_rl.plan.sizes import in_bytes
from spmd_rl.plan.text import rank_text, text
from spmd_rl.plan.traffic import place, weights
from spmd_rl.platforms import CLUSTER
from spmd_rl.platforms.devices import DEVICES

USER_ERROR = 2
# Settings that the weights' layouts follow from. What is wrong with others would stop a run, but not this.
LAYOUT = ("model.path", "parallel.", "rollout.tensor", "rollout.data", "rollout.expert_parallel", "rollout.refresh")


def main(arguments: list[str] | None = None) -> None:
    """Print what was asked for; the exit status is 2 where the user can fix what is wrong."""
    options, rest = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        rest = as_the_run(options, rest) if options.compare else rest
        case, aside = configure(options, rest)
        device = int(options.device_gib * 2**30) if options.device_gib else case.device and case.device.memory
        answer = weights(case, device)
        fullest = "received_fullest_round_bytes", "sent_fullest_round_bytes"
        held = [2 * sum(one[name] for name in fullest) for one in answer["by_rank"]]
        answer["memory"] = memory(case, held, device)
        if case.device is not None:
            answer |= judgement(case, answer, device, options.suggest)
        if options.compare:
            answer["compared"] = compare(case, answer, Path(options.compare))
        if options.picture:
            picture(answer, case, Path(options.picture))
        if options.rank is not None:
            answer["rank"] = answer.pop("by_rank")[options.rank] | place(case, options.rank)
    except ValueError as error:
        print(f"\nspmd_rl could not start with this:\n{error}\n", file=sys.stderr)
        sys.exit(USER_ERROR)
    answer["a_run_would_also_be_refused_for"] = aside
    if options.json:
        print(json.dumps(answer, indent=2))
    else:
        print(rank_text(answer) if options.rank is not None else text(answer))


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the rest: those of a run."""
    parser = argparse.ArgumentParser(
        prog="python -m spmd_rl.plan",
        description="What a run's refresh of the engines' weights moves, on a cluster that need not be here.",
        epilog="All settings of a run can be given too: python -m spmd_rl.grpo --help lists them. "
        "model.path needs to hold no more than a config.json; of the models of configs/ that comes with spmd_rl.",
        allow_abbrev=False,
        usage="%(prog)s --config FILE [--world-size N] [--section.key value ...]",
    )
    parser.add_argument("--config", metavar="FILE", help="the run's YAML file")
    parser.add_argument("--world-size", type=_positive, metavar="N", help="ranks; default: the fewest that fit")
    parser.add_argument("--ranks-per-node", type=_positive, default=8, metavar="N", help="default: 8")
    parser.add_argument("--show", choices=("weights",), default="weights", help="weights: what moves between ranks")
    parser.add_argument("--device", choices=tuple(DEVICES), help="a device, by the figures of its maker")
    parser.add_argument("--device-gib", type=_gib, metavar="N", help="memory of a device: says what it leaves")
    parser.add_argument("--suggest", action="store_true", help="with --device: layouts that fit, the fastest first")
    parser.add_argument("--compare", metavar="RUN", help="directory of a run: predictions beside its measurements")
    parser.add_argument("--picture", metavar="FILE", help="memory over a step, as .png, .pdf or .svg")
    parser.add_argument("--prompt-tokens", type=_positive, metavar="N", help="of a prompt, on average; default: most")
    parser.add_argument("--response-tokens", type=_positive, metavar="N", help="the same of a response")
    parser.add_argument("--rank", type=int, metavar="R", help="one rank in detail, with its peers")
    parser.add_argument("--json", action="store_true", help="the same as JSON, sizes in bytes")
    options, rest = parser.parse_known_args(arguments)
    if options.config:
        rest = ["--config", options.config, *rest]
    return options, rest


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError("1 or more")
    return number


def _gib(word: str) -> float:
    number = float(word)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError("more than 0")
    return number


def picture(answer: Json, case: Case, path: Path) -> None:
    """Draw the memory of a step into a file."""
    phases = {phase: one["parts"] for phase, one in answer["memory"]["estimate"].items() if phase != Phase.START}
    model, peak = Path(answer["model"]["path"]).name, answer["memory"]["peak"]
    title = f"{model} on {case.world_size} ranks: {in_bytes(peak['bytes'])} at the peak, in {peak['phase']}"
    seconds = answer.get("time", {}).get("seconds", {})
    draw_memory(path, phases, PARTS, title, seconds, answer.get("fits", {}).get("room"))


def configure(options: argparse.Namespace, rest: list[str]) -> tuple[Case, list[str]]:
    """The case, and what a run would be refused for that doesn't matter here. Raises ValueError as a run does."""
    device = DEVICES[options.device] if options.device else None
    machine = device.platform if device else CLUSTER
    config = with_machine_sizes(with_local_models(load_config(rest), sizes_directory), machine)
    shape = read_model_shape(config.model.path)
    world = options.world_size or fewest_ranks(config)
    problems = check(config, world, shape)
    if options.rank is not None and not 0 <= options.rank < world:
        problems.append(Problem("--rank", options.rank, f"there are {world} ranks", f"use 0 to {world - 1}"))
    if device is not None and config.run.platform not in ("auto", device.platform):
        way = f"leave --device out, or say --run.platform {device.platform}"
        problems.append(Problem("--device", options.device, f"run.platform is {config.run.platform}", way))
    stop = [problem for problem in problems if problem.knob.startswith((*LAYOUT, "--rank", "--device"))]
    refuse(stop)
    train, rollout = TrainLayout.of(config.parallel, world), RolloutLayout.of(config.rollout, world)
    longest = Lengths.longest(config)
    lengths = Lengths(options.prompt_tokens or longest.prompt, options.response_tokens or longest.response)
    given = options.world_size is not None
    case = Case(config, shape, train, rollout, options.ranks_per_node, given, device, lengths)
    return case, [str(problem) for problem in problems if problem not in stop]


if __name__ == "__main__":
    end_with_reader()
    main()
