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
    assert stand_in("bash launch/setup_env.sh cpu", None, tmp_path).startswith(f"ln -s {tmp_path} .venv")


def test_it_stops_at_the_first_command_that_fails_and_names_it(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```bash\nmine=1\ntest $mine = 1\ntest $mine = 2\necho never\n```\n")
    words = [sys.executable, TOOL, page, "--into", tmp_path / "clone"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "failed with 1: test $mine = 2" in done.stderr
    assert len(done.stdout.splitlines()) == 2


def test_the_course_lab_begins_with_the_environment_and_ends_with_the_report():
    found = MADE["commands"]((ROOT / "docs" / "course_lab.md").read_text(encoding="utf-8"))
    assert found[0] == "bash launch/setup_env.sh cpu"
    assert found[-1] == "cat report/report.md"
    assert sum("spmd_rl.grpo" in command for command in found) == 3
