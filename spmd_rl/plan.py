"""A dry run for a cluster you don't have: `python -m spmd_rl.plan --config FILE [--world-size N] [--section.key X]`.

Reads the configuration and the model's config.json, nothing else, and needs no device.
"""

import argparse
import json
import math
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_rl.config.check import check
from spmd_rl.config.config import Config
from spmd_rl.config.load import load_config
from spmd_rl.config.model_shape import ModelShape, read_model_shape
from spmd_rl.distributed.layout import RolloutLayout, TrainLayout
from spmd_rl.weights.families import hf_tensors, megatron_shard, vllm_shard
from spmd_rl.weights.flow import Flow, flow
from spmd_rl.weights.plan import Planner, bucket_of_bytes

USER_ERROR = 2
BYTES = {"float32": 4, "bfloat16": 2}
# What the platforms' records say (Platform.bucket_bytes), which need torch; `auto` means a cluster here.
BUCKET_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20, "npu": 256 << 20, "auto": 256 << 20}
# Settings that the weights' layouts follow from. What is wrong with others would stop a run, but not this.
LAYOUT = ("model.path", "parallel.", "rollout.tensor", "rollout.data", "rollout.expert_parallel")
LISTED = 5
"""Tensors in the list of those that move most."""
PEERS_LISTED = 40
# (name in the output, words in front of it in a table)
FIGURES = (
    ("held in training", "training_bytes"),
    ("held by the engine", "engine_bytes"),
    ("copied on the rank", "copied_bytes"),
    ("received", "received_bytes"),
    ("  from the same node", "received_same_node_bytes"),
    ("  from other nodes", "received_other_nodes_bytes"),
    ("  in the fullest round", "received_fullest_round_bytes"),
    ("sent", "sent_bytes"),
    ("  to the same node", "sent_same_node_bytes"),
    ("  to other nodes", "sent_other_nodes_bytes"),
    ("  in the fullest round", "sent_fullest_round_bytes"),
)


@dataclass(frozen=True)
class Case:
    """What is asked about."""

    config: Config
    shape: ModelShape
    train: TrainLayout
    rollout: RolloutLayout
    ranks_per_node: int
    world_size_given: bool

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.rollout.world


def main(arguments: list[str] | None = None) -> None:
    """Print what was asked for; the exit status is 2 where the user can mend what is wrong."""
    options, rest = _parse(sys.argv[1:] if arguments is None else arguments)
    try:
        case, aside = configure(options, rest)
        answer = weights(case)
        if options.rank is not None:
            answer["rank"] = answer.pop("by_rank")[options.rank] | _place(case, options.rank)
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
        "model.path needs to hold no more than a config.json.",
        allow_abbrev=False,
        usage="%(prog)s --config FILE [--world-size N] [--section.key value ...]",
    )
    parser.add_argument("--config", metavar="FILE", help="the run's YAML file")
    parser.add_argument("--world-size", type=_positive, metavar="N", help="ranks; default: the fewest that fit")
    parser.add_argument("--ranks-per-node", type=_positive, default=8, metavar="N", help="default: 8")
    parser.add_argument("--show", choices=("weights",), default="weights", help="weights: what moves between ranks")
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


def configure(options: argparse.Namespace, rest: list[str]) -> tuple[Case, list[str]]:
    """The case, and what a run would be refused for that doesn't matter here. Raises ValueError as a run does."""
    config = load_config(rest)
    shape = read_model_shape(config.model.path)
    world = options.world_size or fewest_ranks(config)
    problems = check(config, world, shape)
    if options.rank is not None and not 0 <= options.rank < world:
        problems.append(f"--rank = {options.rank}: there are {world} ranks; use 0 to {world - 1}")
    stop = [problem for problem in problems if problem.startswith((*LAYOUT, "--rank"))]
    if stop:
        raise ValueError("\n".join(stop))
    train, rollout = TrainLayout.of(config.parallel, world), RolloutLayout.of(config.rollout, world)
    case = Case(config, shape, train, rollout, options.ranks_per_node, options.world_size is not None)
    return case, [problem for problem in problems if problem not in stop]


def fewest_ranks(config: Config) -> int:
    """The smallest world that both layouts divide."""
    parallel, rollout = config.parallel, config.rollout
    stage = math.lcm(max(1, parallel.tensor), max(1, parallel.expert * parallel.expert_tensor))
    return math.lcm(stage * max(1, parallel.pipeline), max(1, rollout.tensor * rollout.data))


def weights(case: Case) -> dict[str, Any]:
    """What one refresh moves; sizes in bytes."""
    start = time.perf_counter()
    world, size = case.world_size, BYTES[case.config.model.dtype]
    sources = [megatron_shard(case.shape, case.train, rank) for rank in range(world)]
    destinations = [vllm_shard(case.shape, case.rollout, rank) for rank in range(world)]
    mib = case.config.rollout.refresh_bucket_mib
    bucket_bytes = int(mib * 2**20) if mib else BUCKET_BYTES[case.config.run.platform]
    planner = Planner(sources, destinations, case.ranks_per_node, bucket_of_bytes(bucket_bytes, size))
    moved = flow(planner.schedule)
    held = {id(shard): shard.elements * size for shard in (*sources, *destinations)}
    by_rank = [
        _figures(moved, rank, held[id(sources[rank])], held[id(destinations[rank])], size) for rank in range(world)
    ]
    seconds = time.perf_counter() - start
    return {
        "model": {
            "path": case.config.model.path,
            "family": case.shape.family,
            "parameters": sum(map(math.prod, hf_tensors(case.shape).values())),
            "dtype": case.config.model.dtype,
        },
        "ranks": world,
        "ranks_per_node": case.ranks_per_node,
        "fewest_ranks_taken": not case.world_size_given,
        "training": training_words(case),
        "rollout": rollout_words(case),
        "rounds": planner.schedule.rounds,
        "bucket_bytes": bucket_bytes,
        "planning_seconds": round(seconds, 3),
        "network_bytes": moved.tensors.total() * size,
        "figures": {name: _spread([figures[name] for figures in by_rank]) for _, name in FIGURES},
        "peers": _spread([len(figures["peers"]) for figures in by_rank]),
        "largest_tensors": _most(moved.tensors, size),
        "largest_kinds": _kinds(moved.tensors, size),
        "by_rank": by_rank,
    }


def _figures(moved: Flow, rank: int, training_bytes: int, engine_bytes: int, size: int) -> dict[str, Any]:
    one = moved.ranks[rank]
    return {
        "rank": rank,
        "training_bytes": training_bytes,
        "engine_bytes": engine_bytes,
        "copied_bytes": one.copied * size,
        "received_bytes": one.received * size,
        "received_same_node_bytes": one.received_near * size,
        "received_other_nodes_bytes": one.received_far * size,
        "received_fullest_round_bytes": one.fullest_receiving * size,
        "sent_bytes": one.sent * size,
        "sent_same_node_bytes": one.sent_near * size,
        "sent_other_nodes_bytes": one.sent_far * size,
        "sent_fullest_round_bytes": one.fullest_sending * size,
        "peers": [
            {"rank": peer, "received_bytes": one.received_from[peer] * size, "sent_bytes": one.sent_to[peer] * size}
            for peer in sorted(one.received_from.keys() | one.sent_to.keys())
        ],
    }


def _spread(values: list[int]) -> dict[str, Any]:
    most = max(values)
    return {"least": min(values), "mean": sum(values) / len(values), "most": most, "rank_of_most": values.index(most)}


def _most(tensors: Counter[str], size: int) -> list[dict[str, Any]]:
    return [{"tensor": name, "bytes": count * size} for name, count in tensors.most_common(LISTED)]


def _kinds(tensors: Counter[str], size: int) -> list[dict[str, Any]]:
    """The same, of all layers and experts together."""
    totals: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    for name, count in tensors.items():
        kind = re.sub(r"\.\d+\.", ".*.", name)
        totals[kind] += count
        numbers[kind] += 1
    return [
        {"tensors": kind, "number": numbers[kind], "bytes": count * size} for kind, count in totals.most_common(LISTED)
    ]


def _place(case: Case, rank: int) -> dict[str, Any]:
    at = case.train.coords(rank)
    places = {"pipeline": at.pipeline, "data": at.data, "tensor": at.tensor}
    if case.shape.experts:
        places |= {"expert": at.expert, "expert_tensor": at.expert_tensor}
    return {
        "node": rank // case.ranks_per_node,
        "training_place": places,
        "rollout_place": {"engine": case.rollout.replica(rank), "tensor": case.rollout.tensor_rank(rank)},
    }


# ---- words


def training_words(case: Case) -> str:
    """The training layout, as a person would say it."""
    train = case.train
    words = [f"tensor {train.tensor}", f"pipeline {train.pipeline}", f"data {train.data}"]
    chunks = [len(layers) for layers in train.chunk_layers(case.shape.layers)]
    if train.virtual > 1:
        words[1] += f" x {train.virtual} chunks"
    if train.context > 1:
        words.append(f"context {train.context}")
    if case.shape.experts:
        words.append(f"expert {train.expert}")
        if train.expert_tensor > 1:
            words.append(f"expert tensor {train.expert_tensor}")
        words.append(f"{case.shape.experts.count // train.expert} of {case.shape.experts.count} experts on a rank")
    if len(chunks) > 1:
        runs = Counter(chunks)
        layers = " or ".join(str(n) for n in sorted(runs))
        words.append(f"{layers} layers in a {'chunk' if train.virtual > 1 else 'stage'}")
    return ", ".join(words)


def rollout_words(case: Case) -> str:
    """The rollout layout, as a person would say it."""
    layout, experts = case.rollout, case.shape.experts
    if layout.data == 1:
        words = f"{_count(layout.replicas, 'engine')} of {_count(layout.tensor, 'rank')} (tensor {layout.tensor})"
    else:
        words = (
            f"{_count(layout.world // layout.group, 'group')} of {layout.group} ranks "
            f"(tensor {layout.tensor} x data {layout.data})"
        )
    if experts is None:
        return words
    if layout.expert:
        return f"{words}, {experts.count // layout.group} of {experts.count} experts on a rank"
    return words + (", each expert cut over the ranks" if layout.group > 1 else "")


def text(answer: dict[str, Any]) -> str:
    """The answer for a person."""
    lines = _head(answer)
    lines += ["", f"{'on a rank':<24}{'least':>12}{'mean':>12}{'most':>12}   on rank"]
    for label, name in FIGURES:
        spread = answer["figures"][name]
        if label.startswith(" ") and not spread["most"]:
            continue
        cells = "".join(f"{in_bytes(spread[column]):>12}" for column in ("least", "mean", "most"))
        lines.append(f"{label:<24}{cells}   {_where(spread)}")
    peers = answer["peers"]
    cells = f"{peers['least']:>12}{peers['mean']:>12.1f}{peers['most']:>12}"
    lines += [f"{'ranks it exchanges with':<24}{cells}   {_where(peers)}", ""]
    if not answer["network_bytes"]:
        lines.append("No bytes cross the network: every rank trains what its engine needs.")
    else:
        sent = answer["figures"]["sent_bytes"]
        lines.append(
            f"{in_bytes(answer['network_bytes'])} go from rank to rank in a refresh; the rank that sends most sends "
            f"{sent['most'] / sent['mean']:.2f} times the mean."
        )
        lines += ["", f"{'most moved, over all ranks':<60}{'tensors':>10}{'size':>12}"]
        kinds = [(entry["tensors"], entry["number"], entry["bytes"]) for entry in answer["largest_kinds"]]
        lines += [f"{name:<60}{number:>10,}{in_bytes(size):>12}" for name, number, size in kinds]
        lines += ["", f"{'most moved single tensors':<70}{'size':>12}"]
        lines += [f"{entry['tensor']:<70}{in_bytes(entry['bytes']):>12}" for entry in answer["largest_tensors"]]
    return "\n".join([*lines, *_aside(answer)])


def rank_text(answer: dict[str, Any]) -> str:
    """One rank for a person."""
    rank = answer["rank"]
    places = ", ".join(f"{name} {at}" for name, at in rank["training_place"].items())
    engine = rank["rollout_place"]
    lines = _head(answer)
    lines += ["", f"rank {rank['rank']}, on node {rank['node']}", f"{'trains as':<24}{places}"]
    lines.append(f"{'rollout':<24}engine {engine['engine']}, tensor {engine['tensor']}")
    lines += [f"{label:<24}{in_bytes(rank[name]):>12}" for label, name in FIGURES]
    peers = sorted(rank["peers"], key=lambda peer: -peer["received_bytes"] - peer["sent_bytes"])
    if peers:
        lines += ["", f"{'peer':<12}{'node':>6}{'received':>12}{'sent':>12}"]
    for peer in peers[:PEERS_LISTED]:
        node = peer["rank"] // answer["ranks_per_node"]
        cells = f"{in_bytes(peer['received_bytes']):>12}{in_bytes(peer['sent_bytes']):>12}"
        lines.append(f"{'rank ' + str(peer['rank']):<12}{node:>6}{cells}")
    if len(peers) > PEERS_LISTED:
        lines.append(f"and {len(peers) - PEERS_LISTED} others; --json lists all")
    return "\n".join([*lines, *_aside(answer)])


def _head(answer: dict[str, Any]) -> list[str]:
    model = answer["model"]
    bucket = in_bytes(answer["bucket_bytes"])
    note = " (the fewest that fit; see --world-size)" if answer["fewest_ranks_taken"] else ""
    parameters = f"{model['parameters'] / 1e9:,.{1 if model['parameters'] > 1e10 else 3}f} billion parameters"
    return [
        f"{'model':<12}{Path(model['path']).name}: {model['family']}, {parameters}, {model['dtype']}",
        f"{'ranks':<12}{answer['ranks']}, {answer['ranks_per_node']} on a node{note}",
        f"{'training':<12}{answer['training']}",
        f"{'rollout':<12}{answer['rollout']}",
        f"{'refresh':<12}{_count(answer['rounds'], 'round')}; in each a rank receives and sends at most {bucket}",
        f"{'planning':<12}{answer['planning_seconds']:.1f} s for all ranks",
    ]


def _where(spread: dict[str, Any]) -> str:
    return "any" if spread["least"] == spread["most"] else str(spread["rank_of_most"])


def _aside(answer: dict[str, Any]) -> list[str]:
    aside = answer["a_run_would_also_be_refused_for"]
    return ["", "A run would still be refused here:", *aside] if aside else []


def in_bytes(size: float) -> str:
    """A size in the unit that suits it."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size:.0f} B" if size else "0"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


if __name__ == "__main__":
    main()
