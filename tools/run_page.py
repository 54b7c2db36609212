"""Run the commands of a page in order, as a reader would: python tools/run_page.py docs/course_lab.md --into /tmp/fresh

The blocks marked ```bash are run, one after another in one shell, in a fresh clone of the last commit. Other
blocks (```sh for other machines, outputs) are not. What they say goes to DIR.log; how long each took is printed.
"""

import argparse
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_HEREDOC = re.compile(r"<<-?\s*'?(\w+)'?")
_MARK = "@@ command"
# What fetches from the network, and where it puts it: a copy can stand in for it.
_DOWNLOAD = re.compile(r"^(?:curl|hf download)\b.*(?:-o|--local-dir) (\S+)", re.DOTALL)


def commands(page: str) -> list[str]:
    """Return the commands of a page's bash blocks, each with its continued lines and here-documents."""
    found = []
    for block in _BLOCK.findall(page):
        lines = iter(block.splitlines())
        for line in lines:
            command = line
            while command.endswith("\\"):
                command += "\n" + next(lines)
            if heredoc := _HEREDOC.search(command):
                while not command.endswith("\n" + heredoc[1]):
                    command += "\n" + next(lines)
            if command.strip() and not command.startswith("#"):
                found.append(command)
    return found


def stand_in(command: str, data: Path | None, venv: Path | None) -> str:
    """Return the command, or a copy out of `data` where it downloads what lies there under the same name; `venv`: takes
    the place of what launch/setup_env.sh makes."""
    if venv is not None and command.startswith("bash launch/setup_env.sh"):
        return f"ln -s {venv} .venv && export PYTHONPATH=$PWD"
    target = _DOWNLOAD.match(command)
    if target is None or data is None or not (copy := data / Path(*Path(target[1]).parts[1:])).exists():
        return command
    return f"mkdir -p {Path(target[1]).parent} && cp -r {copy} {target[1]}"


def script(found: list[str]) -> str:
    """Return one shell script that says before each command which it is, and stops at the first that fails."""
    steps = [f"printf '\\n{_MARK} %s %s\\n' {number} $EPOCHREALTIME\n{command}" for number, command in enumerate(found)]
    end = f"printf '\\n{_MARK} %s %s\\n' {len(found)} $EPOCHREALTIME"
    return "\n".join(["set -eo pipefail", *steps, end, ""])


def seconds(log: str) -> list[float]:
    """Return how long each command took that ended well."""
    times = [float(when) for _, when in re.findall(rf"^{_MARK} (\d+) (\S+)$", log, re.MULTILINE)]
    return [after - before for before, after in zip(times, times[1:], strict=False)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--into", type=Path, required=True, help="directory of the fresh clone; it must not exist")
    parser.add_argument("--data", type=Path, help="copies of what the page downloads into dataset/, in its place")
    parser.add_argument("--venv", type=Path, help="an environment made before, in place of launch/setup_env.sh")
    parser.add_argument("--list", action="store_true", help="show the commands, and run nothing")
    chosen = parser.parse_args()
    data, venv = (path and path.resolve() for path in (chosen.data, chosen.venv))
    found = [stand_in(command, data, venv) for command in commands(chosen.page.read_text(encoding="utf-8"))]
    if chosen.list:
        print("\n".join(found))
        return 0
    if chosen.into.exists():
        parser.error(f"--into {chosen.into}: it exists already")
    subprocess.run(["git", "clone", "--quiet", ROOT, chosen.into], check=True)
    log = chosen.into.with_name(chosen.into.name + ".log")
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as said:
        bash = shutil.which("bash") or "bash"
        ended = subprocess.run(
            [bash, "-c", script(found)], cwd=chosen.into, stdout=said, stderr=subprocess.STDOUT, check=False
        )
    took = seconds(log.read_text(encoding="utf-8"))
    for command, many in zip(found, took, strict=False):
        print(f"{many:7.1f} s  {command.splitlines()[0][:100]}")
    if ended.returncode:
        print(f"failed with {ended.returncode}: {found[len(took)]}; see the end of {log}", file=sys.stderr)
        return 1
    print(f"{time.monotonic() - started:7.1f} s  all {len(found)} commands; what they said: {log}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
