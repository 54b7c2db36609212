"""Answers as a person reads them."""

from pathlib import Path
from textwrap import wrap

from spmd_rl.config.engine_cache import GIB
from spmd_rl.estimate.rank_memory import PARTS
from spmd_rl.plan.case import Json, count
from spmd_rl.plan.compare import compare_text
from spmd_rl.plan.judgement_text import judgement_text
from spmd_rl.plan.sizes import in_bytes
from spmd_rl.plan.traffic import FIGURES

PEERS_LISTED = 40


def text(answer: Json) -> str:
    """The answer for a person."""
    lines = _head(answer)
    lines += ["", f"{'on a rank':<24}{'least':>12}{'mean':>12}{'most':>12}   on rank"]
    for label, name in FIGURES:
        spread = answer["figures"][name]
        if label.startswith(" ") and not spread["most"]:
            continue
        cells = "".join(f"{in_bytes(spread[column]):>12}" for column in ("least", "mean", "most"))
        lines.append(f"{label:<24}{cells}   {_where(spread)}")
    lines += _memory(answer["memory"])
    if "time" in answer:
        lines += judgement_text(answer)
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
    if "compared" in answer:
        lines += ["", *compare_text(answer["compared"])]
    return "\n".join([*lines, *_aside(answer)])


def _memory(memory: Json) -> list[str]:
    """The models on a device at the peak of each phase."""
    device = memory["device_bytes"]
    lines = [
        "",
        f"{'models on a device in':<24}{'least':>12}{'most':>12}{'' if device is None else 'leaves':>12}   on rank",
    ]
    for phase, spread in memory["phases"].items():
        cells = f"{in_bytes(spread['least']):>12}{in_bytes(spread['most']):>12}"
        cells += f"{'' if device is None else in_bytes(spread['margin']):>12}"
        lines.append(f"{phase:<24}{cells}   {_where(spread)}")
    if memory["cache_left_to_the_device"]:
        lines.append("rollout.cache_gib is what the device leaves" + (": say --device-gib" if device is None else ""))
    return [*lines, "", *_estimate(memory), ""]


_HEADINGS = {"engine's work": "its work", "reward model": "judge", "activations": "activat.", "reference": "referen."}


def _estimate(memory: Json) -> list[str]:
    """All that is on the fullest rank of each phase, part by part."""
    phases = memory["estimate"]
    parts = [name for name in PARTS if any(name in one["parts"] for one in phases.values())]
    heading = "".join(f"{_HEADINGS.get(name, name)[:9]:>10}" for name in parts)
    lines = [f"{'estimate, GiB':<18}{'all':>7}{heading}"]
    for phase, one in phases.items():
        cells = "".join(f"{one['parts'][name] / GIB:>10.2f}" if name in one["parts"] else " " * 10 for name in parts)
        lines.append(f"  {phase:<16}{one['bytes'] / GIB:>7.2f}{cells}".rstrip())
    peak = memory["peak"]
    most = sorted(peak["parts"].items(), key=lambda part: -part[1])[:3]
    words = ", ".join(f"{name} {in_bytes(size)}" for name, size in most)
    return [*lines, f"peak: {in_bytes(peak['bytes'])} in {peak['phase']} on rank {peak['rank']}, of that {words}"]


def rank_text(answer: Json) -> str:
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


def _tower(model: Json) -> list[str]:
    if "tower" not in model:
        return []
    some = "" if model["tower_frozen"] in (0, model["tower"]) else f" {model['tower_frozen'] / 1e9:.3f} billion of"
    kept = f"; the first refresh alone moves{some} them" if model["tower_frozen"] else ""
    return [
        f"{'vision':<12}{model['tower_layers']} layers and a projector, {model['tower'] / 1e9:.3f} billion of the "
        f"parameters, whole on every rank of the first stage{kept}"
    ]


def _head(answer: Json) -> list[str]:
    model = answer["model"]
    bucket = in_bytes(answer["bucket_bytes"])
    note = " (the fewest that fit; see --world-size)" if answer["fewest_ranks_taken"] else ""
    parameters = f"{model['parameters'] / 1e9:,.{1 if model['parameters'] > 1e10 else 3}f} billion parameters"
    shipped = "" if model["here"] else " (sizes as shipped)"
    return [
        f"{'model':<12}{Path(model['path']).name}: {model['family']}, {parameters}, {model['dtype']}{shipped}",
        *_tower(model),
        f"{'ranks':<12}{answer['ranks']}, {answer['ranks_per_node']} on a node{note}",
        f"{'training':<12}{answer['training']}",
        f"{'rollout':<12}{answer['rollout']}",
        *wrap(answer["cache"], 120, initial_indent=f"{'cache':<12}", subsequent_indent=" " * 12),
        f"{'refresh':<12}{count(answer['rounds'], 'round')}; in each a rank receives and sends at most {bucket}",
        f"{'planning':<12}{answer['planning_seconds']:.1f} s for all ranks",
    ]


def _where(spread: Json) -> str:
    return "any" if spread["least"] == spread["most"] else str(spread["rank_of_most"])


def _aside(answer: Json) -> list[str]:
    aside = answer["a_run_would_also_be_refused_for"]
    return ["", "A run would still be refused here:", *aside] if aside else []
