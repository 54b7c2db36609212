import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_rl.errors import name_variable
from spmd_rl.runtime.cache_home import use_writable_cache
from spmd_rl.runtime.process import USER_ERROR, collecting_no_garbage

REFUSES = """
import sys
from spmd_rl.runtime.process import launch

def configure(arguments):
    assert arguments == ["--train.steps", "0"] and "torch" not in sys.modules
    raise ValueError("train.steps = 0: out of range")

launch(configure, lambda settings, started: print("begun"), ["--train.steps", "0"])
"""
LIVES = """
import gc
from spmd_rl.runtime.process import launch

def live(settings, started):
    assert settings == 7 and not gc.isenabled()
    started()
    assert gc.isenabled() and gc.get_freeze_count() > 0
    print("lived")

launch(lambda arguments: 7, live, [])
"""

SHOWS = """
from spmd_rl.runtime.process import launch

launch(lambda arguments: print("a sample: \u4e2d\u6587 \u00e9"), lambda settings, started: None, ["--help"])
"""


def ended(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | variables
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)


def test_what_is_wrong_with_the_settings_ends_a_program_before_torch_comes_in():
    end = ended(REFUSES)
    assert end.returncode == USER_ERROR and "begun" not in end.stdout
    assert "spmd_rl cannot start:\ntrain.steps = 0: out of range" in end.stderr


@pytest.mark.spmd
@pytest.mark.parametrize("only", ["", "1"])
def test_what_all_ranks_of_a_node_have_met_its_first_one_says_and_another_what_it_alone_has_met(tmp_path, only):
    hangs = f"    if os.environ['LOCAL_RANK'] not in '{only or '0 1 2'}':\n        time.sleep(600)\n"
    script = tmp_path / "refuses.py"
    short = "import os, time\nimport spmd_rl.runtime.process as p\np.OTHERS_WAIT_SECONDS = "
    short += f"{1.0 if only else 120.0}\n\ndef conf"
    script.write_text(REFUSES.replace("def conf", short).replace("    raise Val", hangs + "    raise Val"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3", str(script)]
    end = subprocess.run(command, capture_output=True, text=True, check=False)
    who = f"\nlocal rank {only} of spmd_rl" if only else "\nspmd_rl"
    _, said, rest = end.stderr.partition(f"{who} cannot start:\ntrain.steps = 0: out of range\n")
    assert end.returncode != 0 and said, end.stderr
    assert end.stderr.count("cannot start") == 1 and "ValueError: train.steps = 0: out of range" in rest


@pytest.mark.long
def test_a_program_lives_after_its_start_and_ends_well():
    end = ended(LIVES)
    assert (end.returncode, end.stdout) == (0, "lived\n"), end.stderr


@pytest.mark.long
def test_an_error_in_a_programs_life_ends_it_with_its_traceback():
    end = ended(LIVES.replace('print("lived")', 'raise RuntimeError("no more")'))
    assert end.returncode == 1 and "RuntimeError: no more" in end.stderr


def test_a_signal_that_ends_a_program_is_one_line_with_its_last_words():
    waits = """
import os, signal, time
from spmd_rl.runtime.process import launch

def live(settings, started):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

launch(lambda arguments: 7, live, [], last_words=lambda: "; the same command resumes from step 3")
"""
    end = ended(waits)
    assert end.returncode == 128 + 2
    assert end.stderr == "\nended by SIGINT; the same command resumes from step 3\n"


def test_a_signal_ends_a_program_whose_terminal_is_closed(tmp_path):
    waits = f"""
import os, pathlib, signal, time
from spmd_rl.runtime.process import launch

def live(settings, started):
    reads, writes = os.pipe()
    os.close(reads)
    os.dup2(writes, 2)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

launch(lambda arguments: 7, live, [], last_words=lambda: pathlib.Path({str(tmp_path / "words")!r}).write_text("") or "")
"""
    assert ended(waits).returncode == 128 + 15
    assert (tmp_path / "words").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "call, rank, status",
    [
        ("main(print, [])", {}, 2),
        ("sys.exit(main(print, []))", {}, 2),
        ("def own(): main(print, [])\nown()", {}, 0),
        ("def own(): main(print, [])\nown()", {"TORCHELASTIC_RUN_ID": "1"}, 2),
        ("main(print, ['--help'])", {}, 0),
    ],
)
def test_a_file_that_drops_the_status_of_its_loop_ends_with_it(call, rank, status):
    end = ended(f"import sys\nfrom spmd_rl.api import main\n{call}", **rank)
    assert end.returncode == status, end.stderr
    assert status == 0 or "spmd_rl cannot start:\nmodel.path: not set" in end.stderr


@pytest.mark.long
def test_a_signal_that_a_thread_of_a_library_takes_ends_a_program_too():
    blocked = """
import os, signal, threading, time
from spmd_rl.runtime.process import launch

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # before: it blocks no signal

def live(settings, started):
    [other] = [thread for thread in threading.enumerate() if thread.daemon and thread.name != "signals"]
    threading.Timer(0.2, lambda: signal.pthread_kill(other.ident, signal.SIGTERM)).start()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # as in a collective: no bytecode is run

launch(lambda arguments: 7, live, [])
"""
    end = ended(blocked)
    assert (end.returncode, end.stderr) == (128 + 15, "\nended by SIGTERM\n")


@pytest.mark.long
def test_nothing_is_said_of_an_error_where_a_signal_ends_all_ranks():
    fails = """
import os, signal, threading
from spmd_rl.runtime.process import launch

def live(settings, started):
    threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    raise RuntimeError("connection reset by peer")

launch(lambda arguments: 7, live, [], failed=print)
"""
    end = ended(fails)
    assert (end.returncode, end.stdout, end.stderr) == (128 + 2, "", "\nended by SIGINT\n")


@pytest.mark.long
def test_what_is_forked_has_its_signals_for_itself():
    forks = """
import os, signal, time
from spmd_rl.runtime.process import launch

def live(settings, started):
    if (child := os.fork()) == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    time.sleep(0.2)
    print("lives on")

launch(lambda arguments: 7, live, [])
"""
    end = ended(forks)
    assert (end.returncode, end.stdout) == (0, "lives on\n"), end.stderr


def test_an_interpreter_is_as_it_was_when_a_program_has_returned():
    returns = """
import gc, os, signal
from spmd_rl.runtime.process import run

# What runs in the background of a shell begins with this signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

def configure(arguments):
    raise ValueError("train.steps = 0: out of range")

assert run(configure, print, []) == 2 and gc.isenabled()
try:
    os.kill(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted")
"""
    assert ended(returns).stdout == "interrupted\n"


def test_no_garbage_is_looked_for_while_a_program_starts():
    with collecting_no_garbage():
        assert not gc.isenabled()
        kept = [[] for _ in range(10)]
    assert gc.isenabled() and gc.get_freeze_count() >= len(kept)
    gc.unfreeze()


def test_a_terminal_that_lacks_a_character_shows_its_number_and_the_program_goes_on():
    end = ended(SHOWS, PYTHONIOENCODING="ascii")
    assert end.stdout == "a sample: \\u4e2d\\u6587 \\xe9\n" and "Unicode" not in end.stderr, end.stderr


def test_an_error_about_a_file_names_the_variable_that_says_where_it_is():
    places = {"CACHE_DIR": "/cache/compiled/", "ROOT": "/cache", "PWD": "/cache/compiled/x", "EMPTY": "", "TOP": "/"}
    error = PermissionError(13, "Permission denied", "/cache/compiled/x/1.so")
    name_variable(error, places)
    assert str(error) == "[Errno 13] Permission denied (CACHE_DIR = /cache/compiled): '/cache/compiled/x/1.so'"
    for untouched in (
        OSError(28, "No space left"),
        OSError(13, "denied", "/cached/1"),
        OSError(9, "x", 3),
        KeyError("a"),
    ):
        said = str(untouched)
        name_variable(untouched, places)
        assert str(untouched) == said


def test_a_cache_that_cannot_be_written_is_replaced_and_the_hubs_models_stay_where_they_are(monkeypatch, tmp_path):
    here: dict[str, str] = {"HOME": str(tmp_path)}
    assert use_writable_cache(here) == [] and here == {"HOME": str(tmp_path)}
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anything but what is mounted read-only
    [said] = use_writable_cache(here)
    try:
        assert (
            here["HF_HOME"] == f"{tmp_path}/.cache/huggingface" and list(Path(here["XDG_CACHE_HOME"]).iterdir()) == []
        )
        assert here["XDG_CACHE_HOME"] in said and f"{tmp_path}/.cache cannot be written" in said
    finally:
        Path(here["XDG_CACHE_HOME"]).rmdir()
