"""Say where the time of profiled steps went: python tools/summarize_trace.py runs/mine [--top 15]

Reads the traces in the run's profile/ (settings run.profile.*), or the files that are named. By trace: wall time, how
busy host and device were, and the operators that took most time themselves, without those inside them. The traces open
in chrome://tracing and https://ui.perfetto.dev too.
"""

import argparse
import gzip
import json
import signal
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "Kernel")
"""Kinds of events that run on a device."""
HOST = ("cpu_op", "user_annotation", "python_function")


def main(argv: list[str]) -> int:
    """Print a summary of each trace; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0], allow_abbrev=False)
    parser.add_argument("where", type=Path, nargs="+", help="runs, or traces")
    parser.add_argument("--top", type=int, default=15, metavar="N", help="operators to list (15)")
    options = parser.parse_args(argv)
    try:
        traces = [trace for where in options.where for trace in found(where)]
        for trace in traces:
            print("\n".join(summary(trace, options.top)), end="\n\n")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def found(where: Path) -> list[Path]:
    """Return the traces of a run, or the one that was named. Raises ValueError where there are none."""
    if where.is_file():
        return [where]
    traces = sorted([*(where / "profile").glob("*.json*"), *where.glob("*.json.gz")])
    if not traces:
        raise ValueError(f"{where}: there are no traces in it; profile steps with --run.profile.steps 2")
    return traces


def summary(trace: Path, top: int) -> list[str]:
    """Return the lines that are said of a trace."""
    events = read(trace)
    if not events:
        return [f"{trace.name}: nothing was recorded"]
    began, ended = min(e["ts"] for e in events), max(e["ts"] + e["dur"] for e in events)
    wall = ended - began
    host, device = [e for e in events if e.get("cat") in HOST], [e for e in events if e.get("cat") in DEVICE]
    busy = f"host in operators {busy_time(host) / wall:.0%}"
    busy += f", device {busy_time(device) / wall:.0%}" if device else ""
    lines = [f"{trace.name}: {wall / 1e6:.3f} s, {busy}"]
    for title, times, counts in (("device", *totals(device)), ("host, itself", *own_times(host))):
        if times:
            lines.append(f"  {title:<60}{'seconds':>10}{'of all':>8}{'calls':>9}")
        for name, time in times.most_common(top):
            lines.append(f"  {name[:59]:<60}{time / 1e6:>10.4f}{time / wall:>8.1%}{counts[name]:>9}")
    return lines


def read(trace: Path) -> list[dict[str, Any]]:
    """Return the events of a trace that have a length."""
    opened = gzip.open if trace.suffix == ".gz" else open
    with opened(trace, "rt", encoding="utf-8") as file:
        try:
            content = json.load(file)
        except ValueError as error:
            raise ValueError(f"{trace}: not a trace ({error})") from error
    events = content.get("traceEvents", []) if isinstance(content, dict) else content
    return [{**e, "ts": float(e["ts"]), "dur": float(e["dur"])} for e in events if e.get("ph") == "X" and "dur" in e]


def busy_time(events: list[dict[str, Any]]) -> float:
    """Return the time in which at least one of the events is under way."""
    total, until = 0.0, float("-inf")
    for begins, ends in sorted((e["ts"], e["ts"] + e["dur"]) for e in events):
        total += max(0.0, ends - max(begins, until))
        until = max(until, ends)
    return total


def totals(events: list[dict[str, Any]]) -> tuple[Counter[str], Counter[str]]:
    """Return time and number of the events of each name."""
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in events:
        times[event["name"]] += event["dur"]
        counts[event["name"]] += 1
    return times, counts


def own_times(events: list[dict[str, Any]]) -> tuple[Counter[str], Counter[str]]:
    """Return the same, of each event without those of its thread that are inside it."""
    times, counts = totals(events)
    threads: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        threads[event.get("pid"), event.get("tid")].append(event)
    for thread in threads.values():
        above: list[dict[str, Any]] = []
        for event in sorted(thread, key=lambda e: (e["ts"], -e["dur"])):
            while above and above[-1]["ts"] + above[-1]["dur"] <= event["ts"]:
                above.pop()
            if above:
                times[above[-1]["name"]] -= event["dur"]
            above.append(event)
    return times, counts


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # who reads what is printed, as head does, may have seen enough
    sys.exit(main(sys.argv[1:]))
