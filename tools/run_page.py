"""Run the commands of a page in order, as a reader would: python tools/run_page.py docs/course_lab.md --into /tmp/fresh

The blocks marked ```bash are run, one after another in one shell, in a fresh clone of the last commit. Other
blocks (```sh for other machines, outputs) are not. What they say goes to DIR.log; how long each took is printed.
After a failure --from N goes on in the same clone. What is copied in place of a download (--data) is said.
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
# What a shell forgets when it ends.
_OF_THE_SHELL = re.compile(r"^(?:source|export|cd) |^\w+=|&& export ")


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
        return f"ln -sfn {venv} .venv && export PYTHONPATH=$PWD"
    target = _DOWNLOAD.match(command)
    if target is None or data is None or not (copy := data / Path(*Path(target[1]).parts[1:])).exists():
        return command
    return f"mkdir -p {Path(target[1]).parent} && cp -r {copy} {target[1]}"


def script(found: list[str], first: int = 0) -> str:
    """Return one shell script that says before each command which it is, and stops at the first that fails.

    Of those before `first` only what the shell itself keeps is done again: variables and the environment."""
    steps = [command for command in found[:first] if _OF_THE_SHELL.search(command)]
    for number, command in enumerate(found[first:], first):
        steps.append(f"printf '\\n{_MARK} %s %s\\n' {number + 1} $EPOCHREALTIME\n{command}")
    end = f"printf '\\n{_MARK} %s %s\\n' {len(found) + 1} $EPOCHREALTIME"
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
    parser.add_argument("--from", type=int, default=1, dest="first", help="go on in --into with this command of --list")
    parser.add_argument("--list", action="store_true", help="show the commands and their numbers, and run nothing")
    chosen = parser.parse_args()
    data, venv = (path and path.resolve() for path in (chosen.data, chosen.venv))
    written = commands(chosen.page.read_text(encoding="utf-8"))
    found = [stand_in(command, data, venv) for command in written]
    if chosen.list:
        print("\n".join(f"{number:3} {command}" for number, command in enumerate(found, 1)))
        return 0
    if not 1 <= chosen.first <= len(found):
        parser.error(f"--from {chosen.first}: the page has commands 1 to {len(found)} (--list shows them)")
    if chosen.first > 1 and not chosen.into.is_dir():
        parser.error(f"--from {chosen.first} goes on in --into {chosen.into}, which is not there")
    if chosen.first == 1:
        if chosen.into.exists():
            parser.error(f"--into {chosen.into}: it exists already; --from N goes on there")
        subprocess.run(["git", "clone", "--quiet", ROOT, chosen.into], check=True)
    return run(found, written, chosen.first - 1, chosen.into)


def run(found: list[str], written: list[str], first: int, into: Path) -> int:
    """Run the commands from `first` on (counted from 0) in `into`, and print how long each took."""
    log = into.with_name(f"{into.name}.log" if not first else f"{into.name}.from_{first + 1}.log")
    for number, (command, original) in enumerate(zip(found, written, strict=True), 1):
        if command != original and number > first:
            print(
                f"{number:3} not run as it stands: {original.splitlines()[0][:60]} ...; in its place: {command}",
                flush=True,
            )
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as said:
        ended = subprocess.run(
            [shutil.which("bash") or "bash", "-c", script(found, first)],
            cwd=into, stdout=said, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    took = seconds(log.read_text(encoding="utf-8"))
    for number, many in enumerate(took, first):
        print(f"{number + 1:3} {many:7.1f} s  {found[number].splitlines()[0][:100]}")
    if ended.returncode:
        failed = first + len(took)
        print(f"failed with {ended.returncode}: {found[failed]}; see the end of {log}", file=sys.stderr)
        print(f"when it is fixed: the same command with --from {failed + 1}", file=sys.stderr)
        return 1
    print(f"{time.monotonic() - started:7.1f} s  all {len(took)} commands; what they said: {log}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
