"""tools/run_page.py finds the commands of a page and runs them in order."""

import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "run_page.py"
MADE = runpy.run_path(str(TOOL))
PAGE = """\
```sh
npu-smi info
```

```bash
# a comment
echo one \\
    two
cat > mine.py <<'END'
print(1)
END
curl -fsSL --create-dirs -o dataset/gsm8k/train.jsonl https://example.org/train.jsonl
```

```
an output
```
"""


def test_commands_are_those_of_bash_blocks_with_what_belongs_to_them():
    one, two, three = MADE["commands"](PAGE)
    assert one == "echo one \\\n    two"
    assert two == "cat > mine.py <<'END'\nprint(1)\nEND"
    assert three.startswith("curl")


def test_a_copy_stands_in_for_a_download_and_an_environment_for_the_set_up(tmp_path):
    download, stand_in = MADE["commands"](PAGE)[-1], MADE["stand_in"]
    assert stand_in(download, tmp_path, None) == download
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train.jsonl").touch()
    assert stand_in(download, tmp_path, None).endswith(f"cp -r {tmp_path}/gsm8k/train.jsonl dataset/gsm8k/train.jsonl")
    assert stand_in("bash launch/setup_env.sh cpu", None, tmp_path).startswith(f"ln -sfn {tmp_path} .venv")


def test_it_stops_at_the_first_command_that_fails_and_names_it(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```bash\nmine=1\ntest $mine = 1\ntest $mine = 2\necho never\n```\n")
    words = [sys.executable, TOOL, page, "--into", tmp_path / "clone"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "failed with 1: test $mine = 2" in done.stderr
    assert "with --from 3" in done.stderr
    assert len(done.stdout.splitlines()) == 2


def test_it_goes_on_with_the_command_that_failed_and_with_what_the_shell_knew(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```bash\nmine=1\ntouch seen && test -f fixed\necho $mine > said\n```\n")
    words = [sys.executable, TOOL, page, "--into", tmp_path / "clone"]
    assert subprocess.run(words, capture_output=True, check=False).returncode == 1
    (tmp_path / "clone" / "fixed").touch()
    again = subprocess.run([*words, "--from", "2"], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert [line.split()[0] for line in again.stdout.splitlines()[:2]] == ["2", "3"]
    assert (tmp_path / "clone" / "said").read_text() == "1\n"


def test_a_command_that_something_else_stands_in_for_is_named(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.txt").touch()
    page = tmp_path / "page.md"
    page.write_text("```bash\ncurl -fsSL -o dataset/mine.txt https://example.org/mine.txt\n```\n")
    words = [sys.executable, TOOL, page, "--into", tmp_path / "clone", "--data", tmp_path / "data"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "1 not run as it stands: curl" in done.stdout


def test_the_course_lab_begins_with_the_environment_and_ends_with_the_report():
    found = MADE["commands"]((ROOT / "docs" / "course_lab.md").read_text(encoding="utf-8"))
    assert found[0] == "bash launch/setup_env.sh cpu"
    assert found[-1] == "cat report/report.md"
    assert sum("spmd_rl.grpo" in command for command in found) == 3
