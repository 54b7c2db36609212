"""Start ranks as torchrun does: `python -m spmd_rl.runtime.torchrun --standalone --nproc_per_node 2 -m spmd_rl.grpo`.

Takes torchrun's own arguments. The settings are checked before any rank starts, the exit status is that of the rank
that failed first, and in place of torchrun's report its error is said in a few lines.
"""

import gc
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from threading import Thread, Timer
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from spmd_rl.config.redact import hidden
from spmd_rl.errors import refuse
from spmd_rl.runtime.process import INCOMPLETE, USER_ERROR, silence_libraries, user_errors_exit

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

CHECKED = {"spmd_rl.grpo": False, "spmd_rl.ppo": True}
"""Programs whose settings are checked here, where the number of ranks is known, and whether they have a critic."""
_SAYS_IT_ITSELF = (USER_ERROR, INCOMPLETE)
"""Exit statuses of ranks whose first local one has told the reason in its last lines."""
_ENDS = ("multiprocessing.api", "multiprocessing.errors.error_handler", "multiprocessing.errors", "agent.server.api")
"""Loggers of torchrun that tell of each process that ends."""
_LIBRARY = re.compile(r"site-packages|/lib/python3|spmd_rl/runtime/process\.py")
_PLACES = (
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "rdzv_backend",
    "rdzv_endpoint",
    "rdzv_id",
    "standalone",
)
"""Options of torchrun that say where ranks meet."""
FRAMES = 4
_HELP = 120
"""Exit status of the process that checks where help was all that was asked for."""
QUIET_SECONDS = 10.0
"""So long a node waits for the others' ends before it says so."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run torchrun; exit with the status of the first rank that failed."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    silence_libraries()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not one that a shell ignores
        signal.signal(signal.SIGINT, _interrupted)  # until there are ranks: then torchrun takes it
    checked = check_beside(words)
    words = meeting(words)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun would set it, and say so in five lines
    gc.disable()  # what imports make stays: looking for garbage among it takes a tenth of their time
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    gc.freeze()
    gc.enable()
    for name in () if os.environ.get("SPMD_RL_VERBOSE") else _ENDS:
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    SimpleElasticAgent._exit_barrier = saying_so(SimpleElasticAgent._exit_barrier)
    checked()
    try:
        torchrun(words)
    except ChildFailedError as failed:
        status, said = last_words(failed)
        if said:
            print(f"\n{said}", file=sys.stderr, flush=True)
        sys.exit(status)
    except SignalException as ended:  # rank 0 has said it
        sys.exit(128 + ended.sigval)


def _interrupted(received: int, frame: FrameType | None) -> NoReturn:
    print("\nended by SIGINT before the ranks started", file=sys.stderr, flush=True)
    os._exit(128 + received)


def check_beside(words: Sequence[str]) -> Callable[[], None]:
    """Check the settings in a process of its own while this one imports torch; return what waits until that is done.

    Where they are refused this process ends at once, with the same status: what the other has said are the last words.
    """
    if _program_at(words) is None:
        return lambda: None
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        _check_and_leave(words)

    def follow() -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if status:
            os._exit(0 if status == _HELP else 128 - status if status < 0 else status)

    following = Thread(target=follow, name="settings", daemon=True)
    following.start()
    return following.join


def _check_and_leave(words: Sequence[str]) -> NoReturn:
    status = 1
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which the other process, of the same terminal, tells
    try:
        with user_errors_exit():
            check(words)
        status = 0
    except SystemExit as ended:  # also --help
        failed = ended.code if isinstance(ended.code, int) else 1
        status = failed if ended.code else _HELP
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def check(words: Sequence[str]) -> None:
    """Check the settings of a program of ours. Raises ValueError with all problems; says in a line that it starts."""
    at = _program_at(words)
    if at is None:
        return
    program = words[at + 1]
    here = _number(words[:at], "nproc_per_node")
    ranks = here * _number(words[:at], "nnodes")
    if ranks < 1:  # gpu, auto, 1:4: torchrun alone knows how many that is
        return
    from spmd_rl.runtime.preflight import directory_problems
    from spmd_rl.runtime.startup import configure

    sizes = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(here)}
    before = {name: os.environ.pop(name) for name in sizes if name in os.environ}
    os.environ |= sizes
    try:
        config, _ = configure(list(words[at + 2 :]), CHECKED[program])
        if ranks == here:
            refuse(directory_problems(config))
    finally:
        for name in sizes:
            del os.environ[name]
        os.environ |= before
    print(f"{program}: the settings are right; starting {ranks} rank{'s' * (ranks > 1)}", flush=True)


def _program_at(words: Sequence[str]) -> int | None:
    """Return where a program is named whose settings are checked here."""
    at = next((at for at, word in enumerate(words[:-1]) if word in ("-m", "--module")), None)
    return None if at is None or words[at + 1] not in CHECKED else at


def meeting(words: list[str]) -> list[str]:
    """Return the words with a port of the run's own where nothing says where its ranks meet: two runs of a machine.

    Ranks of one machine meet by no name of it, which need not resolve: torchrun would try that for five minutes.
    """
    at = next((at for at, word in enumerate(words) if word in ("-m", "--module")), len(words))
    named = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in words[:at]}
    named |= {name.removeprefix("PET_").lower() for name in os.environ if name.startswith("PET_")}
    told = [] if named.intersection(_PLACES) else ["--standalone"]
    if (told or "standalone" in named) and "local_addr" not in named:
        told = [*told, "--local_addr", "localhost"]
    return [*told, *words]


def saying_so(wait: "Callable[[SimpleElasticAgent], None]") -> "Callable[[SimpleElasticAgent], None]":
    """Let a node say that it waits for the others to end, where that takes long: one that is gone never does."""

    @wraps(wait)
    def waiting(agent: "SimpleElasticAgent") -> None:
        limit = f"{agent._exit_barrier_timeout:g} s"
        said = f"launch: the ranks of this node have ended well; waiting for the other nodes, for up to {limit}"
        timer = Timer(QUIET_SECONDS, partial(print, said, file=sys.stderr, flush=True))
        timer.daemon = True
        timer.start()
        try:
            wait(agent)
        finally:
            timer.cancel()

    return waiting


def _number(options: Sequence[str], name: str) -> int:
    """Return the number that one of torchrun's options has; 1: it is not set, 0: it is no number."""
    for at, option in enumerate(options):
        given, equals, value = option.lstrip("-").replace("-", "_").partition("=")
        if given == name:
            value = option.partition("=")[2] if equals else next(iter(options[at + 1 : at + 2]), "")
            return int(value) if value.isdigit() else 0
    return 1


def last_words(failed: "ChildFailedError") -> tuple[int, str]:
    """Return the exit status of the first rank that failed, and its error and where it was."""
    rank, failure = failed.get_first_failure()
    code = failure.exitcode
    if code in _SAYS_IT_ITSELF:
        return code, ""
    ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed (exit status {code})"
    hint = "; was the machine out of memory?" if code == -signal.SIGKILL else ""
    message, frames = _error(failure.message)
    said = f"rank {rank} {ended}{hint}" + (f": {message}" if message else "")
    return 128 - code if code < 0 else code, hidden("\n".join([said, *frames]))


def _error(message: Any) -> tuple[str, list[str]]:
    """Return the text of an error that a rank wrote down, and its last frames outside of libraries, innermost last."""
    if not isinstance(message, Mapping) or "extraInfo" not in message:
        return "", []
    stack = re.findall(r'^ *File "(.+)", line (\d+), in (.+)$', message["extraInfo"]["py_callstack"], re.MULTILINE)
    own = [part for part in stack if not _LIBRARY.search(part[0]) and part[2] != "acting"]  # what launch wraps around
    frames = [f"  {Path(file).name}:{line} in {name}" for file, line, name in own]
    return str(message.get("message", "")), frames[-FRAMES:]


if __name__ == "__main__":
    main()
