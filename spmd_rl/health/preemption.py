"""A batch system's request: save, and end. SIGUSR1 brings it, as Slurm sends it before it takes a job's place."""

import signal
import threading

_asked = threading.Event()


def preemption_event() -> threading.Event:
    """Return the event of that request. Called early, in the main thread: until then the signal ends the process."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, lambda *_: _asked.set())
    return _asked
