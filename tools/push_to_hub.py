"""Upload a run's model to the Hugging Face hub: python tools/push_to_hub.py runs/NAME OWNER/NAME [--private]

A run's hf/, or any Hugging Face directory. HF_TOKEN or `hf auth login` says who uploads; HF_ENDPOINT where to.
"""

import argparse
import sys
from pathlib import Path

from spmd_rl.models.hub import push


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="RUN", help="a run, or a Hugging Face directory")
    parser.add_argument("name", metavar="OWNER/NAME", help="on the hub; made where there is none")
    parser.add_argument("--private", action="store_true", help="where it is made: for its owner only")
    given = parser.parse_args(arguments)
    found = next((one for one in (given.directory, given.directory / "hf") if (one / "config.json").is_file()), None)
    if found is None:
        sys.exit(
            f"push_to_hub: {given.directory}: neither config.json nor hf/config.json in it; export the model first"
        )
    try:
        print(push(str(found), given.name, given.private, f"Upload {given.directory.resolve().name}"))
    except ValueError as error:
        sys.exit(f"push_to_hub: {error}")


if __name__ == "__main__":
    main()
