"""List the samples of a run in which the model corrects itself: python tools/find_insights.py runs/NAME

Strongest first, with step and reward, then how often it happens over the steps. What counts: docs/lab.md.
"""

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path

from spmd_rl.analysis.correction_markers import LANGUAGES
from spmd_rl.analysis.curves import Curve, as_text
from spmd_rl.analysis.self_correction import Insight, frequency, insight, ranked
from spmd_rl.data.samples import read_samples
from spmd_rl.distributed.terminal_lines import end_with_reader

BOLD, PLAIN = "\x1b[1;33m", "\x1b[0m"


def block(number: int, found: Insight, colours: bool) -> str:
    """A sample as a person reads it."""
    marks = (BOLD, PLAIN) if colours else (">>", "<<")
    before, marker, after = (part.replace("\n", " ") for part in found.excerpt)
    reward = "" if found.reward is None else f"  reward {found.reward:g}"
    changed = f"  answer {found.before} -> {found.after}" if found.changed else ""
    said = ", ".join(f'{marker.kind} "{marker.text}"' for marker in islice(found.markers, 5))
    more = f", and {len(found.markers) - 5} more" if len(found.markers) > 5 else ""
    place = "" if found.inside_think else "  (no <think>: whole response searched)"
    return (
        f"{number:>3}. strength {found.strength:g}  step {found.step}  sample {found.id}{reward}  {found.cause or ''}"
        f"{changed}{place}\n     {said}{more}\n     {before}{marks[0]}{marker}{marks[1]}{after}\n"
    )


def summary(found: Sequence[Insight], rates: Mapping[int, float], samples: int, width: int) -> str:
    """Return how many, where, and how often over the steps."""
    correct = sum(one.cause == "correct" for one in found)
    changed = sum(one.changed for one in found)
    inside = sum(one.inside_think for one in found)
    lines = [
        f"{len(found)} of {samples} written samples in {len(rates)} steps correct themselves: {inside} inside <think>, "
        f"{len(found) - inside} in responses without one; {correct} end correct, {changed} change a stated answer"
    ]
    if len(rates) > 1 and found:
        curve = Curve("fraction of a step's written samples", tuple(rates), tuple(rates.values()))
        lines.append(as_text([curve], width))
    return "\n".join(lines)


def as_json(found: Iterable[Insight]) -> str:
    return "\n".join(json.dumps(dataclasses.asdict(one), ensure_ascii=False) for one in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="directory of the run")
    parser.add_argument("--top", type=int, default=20, help="how many samples to list (default: %(default)s)")
    parser.add_argument(
        "--language", nargs="+", choices=LANGUAGES, default=LANGUAGES, help="whose markers (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a sample, nothing else")
    arguments = parser.parse_args()
    if arguments.top < 0:
        sys.exit(f"find_insights: --top {arguments.top}: give a number of samples, 0 for the summary only")
    try:
        seen: list[tuple[int, bool]] = []
        found = []
        for sample in read_samples(arguments.run_dir):
            one = insight(sample, arguments.language)
            seen.append((sample["step"], one is not None))
            found += [one] if one else []
    except (ValueError, OSError) as error:
        sys.exit(f"find_insights: {error}")
    top = ranked(found)[: arguments.top]
    if arguments.json:
        if top:
            print(as_json(top))
        return
    for number, one in enumerate(top, 1):
        print(block(number, one, colours=sys.stdout.isatty()))
    print(summary(found, frequency(seen), len(seen), min(100, shutil.get_terminal_size().columns)))


if __name__ == "__main__":
    end_with_reader()
    main()
