"""The life of a process: how an entry point starts, what ends it, and how it leaves."""

import atexit
import gc
import io
import logging
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from types import FrameType
from typing import NoReturn, TypeVar

from spmd_rl.config.redact import hide_in
from spmd_rl.distributed.environment import local_rank_from_environment, rank_from_environment
from spmd_rl.distributed.terminal_lines import share_terminal
from spmd_rl.errors import name_variable
from spmd_rl.health.parent_death import die_with

USER_ERROR = 2
INCOMPLETE = 3
"""Exit status of a run that came to its end and did not do all that it was asked, such as saving a checkpoint."""
OTHERS_WAIT_SECONDS = 10.0
"""Local ranks but the first leave their node's first one so long to say what is wrong."""
_ENDING = (signal.SIGINT, signal.SIGTERM)
_ended = threading.Event()
"""A signal has come that ends this process."""
_SIGNAL_SECONDS = 0.3
"""A signal that all ranks are sent reaches them within so long."""
Settings = TypeVar("Settings")
Started = Callable[[], None]
"""To be called once, when all is there that lives as long as the program."""


def launch(
    configure: Callable[[list[str]], Settings],
    live: Callable[[Settings, Started], str | None],
    arguments: list[str] | None = None,
    before_exit: Callable[[signal.Signals], bool] = lambda received: True,
    last_words: Callable[[], str] = str,
    failed: Callable[[BaseException], None] = lambda error: None,
) -> NoReturn:
    """Run an entry point as `run` does, and end this process with its status."""
    leave(run(configure, live, arguments, before_exit, last_words, failed))


def run(
    configure: Callable[[list[str]], Settings],
    live: Callable[[Settings, Started], str | None],
    arguments: list[str] | None = None,
    before_exit: Callable[[signal.Signals], bool] = lambda received: True,
    last_words: Callable[[], str] = str,
    failed: Callable[[BaseException], None] = lambda error: None,
) -> int:
    """Run an entry point: settings, or what is wrong with them; then a rank's life, which signals end.

    `live` returns what the program was asked and did not do. `before_exit` is called with a signal, on a thread of its
    own, and keeps the program alive with False. On rank 0 `last_words` are said of a signal that ends it. `failed` is
    told of an error that ends this rank. Returns the exit status: 0; USER_ERROR where the user can fix what is wrong;
    INCOMPLETE where something was not done; 1 for any other error, which is said.
    """
    silence_libraries()
    escape_what_the_terminal_lacks()
    if rank_from_environment():
        share_terminal()
    with _exiting_on_signals(before_exit, last_words):
        if "TORCHELASTIC_RUN_ID" in os.environ:  # nobody else would end the ranks of a torchrun that was killed
            die_with(os.getppid(), signal.SIGTERM)
        words = sys.argv[1:] if arguments is None else arguments
        try:
            with ExitStack() as start:
                start.enter_context(collecting_no_garbage())
                return _run(configure, lambda settings: live(settings, start.close), words, failed)
        except SystemExit as ended:  # also --help
            return _status(ended)


def escape_what_the_terminal_lacks() -> None:
    """Write characters that stdout's encoding does not have as escapes: a sample that is shown must not end a run."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _run(
    configure: Callable[[list[str]], Settings],
    live: Callable[[Settings], str | None],
    arguments: list[str],
    failed: Callable[[BaseException], None],
) -> int:
    with user_errors_exit():
        settings = configure(arguments)
    # Only now: what is wrong with the settings is said without waiting for torch.
    from torch.distributed.elastic.multiprocessing.errors import record

    from spmd_rl.distributed.addresses import naming_peers
    from spmd_rl.health.error_file import ERROR_FILE, ErrorFileHandler, write_error
    from spmd_rl.health.watchdog import reporting_timeouts

    try:
        missing = record(hiding_secrets(naming_peers(reporting_timeouts(live))), ErrorFileHandler())(settings)
    except SystemExit:
        raise
    except BaseException as error:
        wait_for_signal()
        with suppress(Exception):
            failed(error)
        sys.excepthook(*sys.exc_info())
        return 1
    if missing:
        print(f"\n{missing} (exit status {INCOMPLETE})", file=sys.stderr, flush=True)
        write_error(missing, missing, os.environ.get(ERROR_FILE, ""))
    return INCOMPLETE if missing else 0


def _status(ended: SystemExit) -> int:
    return ended.code if isinstance(ended.code, int) else int(ended.code is not None)


@contextmanager
def collecting_no_garbage() -> Iterator[None]:
    """Look for no garbage inside, and never again among what was made there.

    Importing and building make millions of objects that live as long as the run: looking for garbage among them takes
    seconds while they are made, and 0.1 s or more each time later.
    """
    gc.disable()
    try:
        yield
        gc.collect()
        gc.freeze()
        # Python waits with full collections until a quarter more objects are there than at the last one: now than none.
        gc.collect()
    finally:
        gc.enable()


@contextmanager
def user_errors_exit() -> Iterator[None]:
    """Take a ValueError inside for what a user can change; it ends the program."""
    try:
        yield
    except ValueError as error:
        exit_with_usage_error(error)


def exit_with_usage_error(error: ValueError) -> NoReturn:
    """Say what the user can change, and leave.

    What all ranks of a node have met its first one says, and torchrun ends the others then.
    """
    hide_in(error)
    if rank := local_rank_from_environment():
        time.sleep(OTHERS_WAIT_SECONDS)
    which = f"local rank {rank} of spmd_rl" if rank else "spmd_rl"
    print(f"\n{which} cannot start:\n{error}\n", file=sys.stderr, flush=True)
    if os.environ.get("SPMD_RL_TRACEBACK"):
        traceback.print_exc()
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        # torchrun ends with a report on the first rank that failed; it quotes this: the last words are the reason.
        from spmd_rl.health.error_file import ErrorFileHandler

        ErrorFileHandler().record_exception(error.with_traceback(None))
    sys.exit(USER_ERROR)


@contextmanager
def _exiting_on_signals(before_exit: Callable[[signal.Signals], bool], last_words: Callable[[], str]) -> Iterator[None]:
    """Leave at once on Ctrl-C and SIGTERM, also while the main thread waits inside a collective.

    A thread reads which signals came: Python runs handlers only between bytecodes of the main thread. Threads and
    processes that are started inside don't take them; a thread of a library from before may, and writes them down too.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone may ask for them
        yield
        return
    came, written = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(written, False)
    before = {received: signal.signal(received, lambda *_: None) for received in _ENDING}
    wakes = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    os.register_at_fork(after_in_child=lambda: _forget_signals(written))

    def wait() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        while True:
            received = os.read(came, 1)[0]
            if received not in _ENDING:
                continue
            _ended.set()
            if before_exit(signal.Signals(received)):
                break
            _ended.clear()
        if rank_from_environment() == 0:
            said = f"\nended by {signal.Signals(received).name}{last_words()}\n"
            with suppress(OSError, ValueError):  # its terminal may be closed, or its reader gone
                # Show the cursor again, which a live progress display hides.
                sys.stderr.write(("\x1b[?25h" if sys.stderr.isatty() else "") + said)
                sys.stderr.flush()
        os._exit(128 + received)

    threading.Thread(target=wait, daemon=True, name="signals").start()
    yield
    signal.set_wakeup_fd(wakes)
    for received, handler in before.items():
        signal.signal(received, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _forget_signals(written: int) -> None:
    """Have the parent of a forked process hear nothing of its signals."""
    if (wakes := signal.set_wakeup_fd(-1)) != written:
        signal.set_wakeup_fd(wakes)
        return
    for received in _ENDING:
        signal.signal(received, signal.SIG_DFL)


def wait_for_signal() -> None:
    """Wait a moment for a signal that ends this process too, where an error may be of ranks that it has ended already.

    Where it came, nothing is to be said of the error.
    """
    if _ended.wait(_SIGNAL_SECONDS):
        time.sleep(OTHERS_WAIT_SECONDS)


def hiding_secrets(act: Callable[[Settings], str | None]) -> Callable[[Settings], str | None]:
    """Let an error that ends the program, and torchrun's report on it, say no secrets."""

    @wraps(act)
    def acting(settings: Settings) -> str | None:
        try:
            return act(settings)
        except Exception as error:
            name_variable(error)
            hide_in(error)
            raise

    return acting


class _StatusAtEnd:
    """End the interpreter with a status that its file did not pass on to sys.exit."""

    status = 0

    def __call__(self) -> None:
        if self.status:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(self.status)


_at_end = _StatusAtEnd()
atexit.register(_at_end)  # before others: what is registered first is done last


def ends_with(status: int, caller: FrameType) -> int:
    """Return a program's status, with which the interpreter is to end also where `caller` drops it.

    That holds in a rank, and in a file that is run and calls at its top level: another caller has its own way to end.
    """
    top = caller.f_globals.get("__name__") == "__main__" and caller.f_code.co_name == "<module>"
    if top or "TORCHELASTIC_RUN_ID" in os.environ:
        _at_end.status = status
    return status


def silence_libraries() -> None:
    """Leave out what the libraries say to their own developers; SPMD_RL_VERBOSE=1 shows it."""
    if os.environ.get("SPMD_RL_VERBOSE"):
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported, which is later
    warnings.filterwarnings("ignore", module=r"(torch|megatron|vllm|transformers)\b")
    for name in ("torch._library.triton", "torch.distributed.distributed_c10d", "transformers", "megatron"):
        logging.getLogger(name).setLevel(logging.ERROR)


def leave(status: int) -> NoReturn:
    """End this process as Python does, but for taking itself apart, which takes seconds with torch and vLLM."""
    if status == 0:
        threading._shutdown()  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # whoever reads it may be gone
            stream.flush()
    os._exit(status)
