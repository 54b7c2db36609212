"""Measure what TASK_QUEUE_ENABLE brings, and tokens a second of each part of a step."""

import json
import os
import statistics
import tempfile
from pathlib import Path

from spmd_rl.platforms import current
from tools.bringup.outcome import expect, leave, not_here
from tools.bringup.runs import made, run, settings

VARIABLE = "TASK_QUEUE_ENABLE"
SHOWN = ("timing/update", "timing/rollout", "vllm_tps", "update_tps", "e2e_tps")


def main() -> None:
    if VARIABLE not in current().environment:
        not_here(f"a {current().name} has no queue of kernels, which {VARIABLE} would turn")
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        model = made("qwen2", root)
        for value in ("1", "2"):
            directory = root / value
            status, said = run(settings(model, directory, 6), environment=os.environ | {VARIABLE: value})
            expect(f"runs with {VARIABLE} = {value}", status == 0, said)
            if status == 0:
                rows = [
                    json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
                ][1:]
                for name in SHOWN:
                    found = [row[name] for row in rows if name in row]
                    print(f"  {name} {statistics.median(found):.4g}" if found else f"  {name}: not there")
    leave()


if __name__ == "__main__":
    main()
