"""Write a judgement for a person: what divides what, seconds, what would not fit, what would, what is faster."""

from textwrap import wrap

from spmd_rl.config.engine_cache import GIB
from spmd_rl.plan.case import Json
from spmd_rl.plan.sizes import in_bytes


def judgement_text(answer: Json) -> list[str]:
    """Return the lines."""
    lines = ["what divides what", *(f"  {one}" for one in answer["divides"]), ""]
    return [*lines, *_time(answer["time"]), "", *_fits(answer), *_suggested(answer), ""]


def _time(time: Json) -> list[str]:
    seconds = ", ".join(f"{phase} {_seconds(took)}" for phase, took in time["seconds"].items())
    figures = time["figures"]
    assumed = (
        f"of {figures['flops'] / 1e12:g} Tflop/s {figures['efficiency']:.0%} are reached, of "
        f"{figures['bandwidth'] / 1e12:g} TB/s {figures['decode']:.0%}, of the links' {figures['link'] / 1e9:g} and "
        f"{figures['network'] / 1e9:g} GB/s {figures['wire']:.0%}, and a layer of the engine takes "
        f"{figures['layer_seconds'] * 1e6:g} us or more: assumptions. {time['source']}"
    )
    head = (
        f"a step on {time['device']}: about {_seconds(time['step_seconds'])}, {time['tokens_per_second']:,.0f} "
        f"tokens/s, {time['e2e_tps']:,.0f} a rank (e2e_tps), at {time['prompt_tokens']:g} + "
        f"{time['response_tokens']:g} tokens a sample"
    )
    return [line for text in (head, seconds, assumed) for line in wrap(text, 118, subsequent_indent="  ")]


def _seconds(took: float) -> str:
    return f"{took:.3g} s"


def _fits(answer: Json) -> list[str]:
    fits = answer.get("fits")
    if fits is None:
        return []
    room = in_bytes(fits["room"])
    if not fits["does_not_fit"]:
        peak = answer["memory"]["peak"]
        return [f"It fits: {in_bytes(peak['bytes'])} in {peak['phase']}, of {room} that can be counted on."]
    over = ", ".join(f"{phase} {in_bytes(size)}" for phase, size in fits["does_not_fit"].items())
    lines = [f"It would NOT fit into the {room} that can be counted on: {over}.", "The nearest that would:"]
    return [*lines, *_all(fits["nearest"])] if fits["nearest"] else [lines[0], "No one or two settings help."]


def _suggested(answer: Json) -> list[str]:
    if "suggested" not in answer:
        return []
    lines = ["", "layouts that fit, the fastest first"]
    return [*lines, *_all(answer["suggested"])] if answer["suggested"] else [*lines, "  none"]


def _candidate(one: Json) -> list[str]:
    words = [f"{name.removeprefix('--')} {_value(value)}" for name, value in one["changes"].items()]
    text = f"{one['tokens_per_second']:>10,.0f} tokens/s {one['bytes'] / GIB:>6.1f} GiB in {one['phase']:<17}"
    return wrap(text + (", ".join(words) or "as it is"), 118, initial_indent="  ", subsequent_indent=" " * 48)


def _all(found: list[Json]) -> list[str]:
    return [line for one in found for line in _candidate(one)]


def _value(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
