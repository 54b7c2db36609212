import gc
import subprocess
import sys

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


def ended(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_what_is_wrong_with_the_settings_ends_a_program_before_torch_comes_in():
    end = ended(REFUSES)
    assert end.returncode == USER_ERROR and "begun" not in end.stdout
    assert "spmd_rl cannot start:\ntrain.steps = 0: out of range" in end.stderr


def test_a_program_lives_after_its_start_and_ends_well():
    end = ended(LIVES)
    assert (end.returncode, end.stdout) == (0, "lived\n"), end.stderr


def test_an_error_in_a_programs_life_ends_it_with_its_traceback():
    end = ended(LIVES.replace('print("lived")', 'raise RuntimeError("no more")'))
    assert end.returncode == 1 and "RuntimeError: no more" in end.stderr


def test_no_garbage_is_looked_for_while_a_program_starts():
    with collecting_no_garbage():
        assert not gc.isenabled()
        kept = [[] for _ in range(10)]
    assert gc.isenabled() and gc.get_freeze_count() >= len(kept)
    gc.unfreeze()
