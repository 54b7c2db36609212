"""Does the same run give the same bits, with run.deterministic and without?"""

import tempfile
from pathlib import Path

from spmd_rl.analysis.compare_runs import compare
from tools.bringup.outcome import expect, leave
from tools.bringup.runs import made, run, settings


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        model = made("qwen2", root)
        for asked in ("True", "False"):
            directories = [root / f"{asked}_{turn}" for turn in range(2)]
            for directory in directories:
                status, said = run(settings(model, directory, 3, "--run.deterministic", asked))
                if status:
                    expect(f"run.deterministic = {asked} runs", False, said)
                    leave()
            difference = compare(*directories).difference
            if asked == "True":
                expect("run.deterministic gives the same bits twice", difference is None, difference)
            else:
                print(f"without it: {difference or 'the same bits too'}")
    leave()


if __name__ == "__main__":
    main()
