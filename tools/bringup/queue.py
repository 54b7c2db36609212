"""Measure what TASK_QUEUE_ENABLE brings, and tokens a second of each part of a step."""

import json
import os
import statistics
import tempfile
from pathlib import Path

from tools.bringup.outcome import expect, leave
from tools.bringup.runs import made, run, settings

SHOWN = ("timing/update", "timing/rollout", "vllm_tps", "update_tps", "e2e_tps")


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        model = made("qwen2", root)
        for value in ("1", "2"):
            directory = root / value
            status, said = run(settings(model, directory, 6), environment=os.environ | {"TASK_QUEUE_ENABLE": value})
            expect(f"runs with TASK_QUEUE_ENABLE = {value}", status == 0, said)
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
