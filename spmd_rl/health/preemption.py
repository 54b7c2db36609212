"""A batch system's request: save, and end. SIGUSR1 brings it, as Slurm sends it before it takes a job's place."""

import signal
import threading

_asked = threading.Event()


def preemption_event() -> threading.Event:
    """Set when this process was asked. Called early, and in the main thread: until then the signal would end it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, lambda *_: _asked.set())
    return _asked
