"""Read and write a conversation on a terminal, or through a pipe."""

import atexit
import contextlib
import os
import select
import sys
import termios
import threading
from collections.abc import Iterator

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
_NO_KEY = b"\0"
_CTRL_C = b"\x03"


class Pipe:
    """Lines in, plain text out: for scripts, and for tests."""

    def __init__(self) -> None:
        self._stop, self._busy = threading.Event(), False

    def ask(self) -> str | None:
        """Return the next line; None: there will be none."""
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None

    def say(self, text: str, thought: bool = False) -> None:
        """Write a piece of an answer."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Write a line about the conversation, which is no part of it."""
        print(text, flush=True)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Let `interrupted` be asked for inside."""
        self._stop.clear()
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    @property
    def interrupted(self) -> bool:
        """The answer that is being given is to end."""
        return self._stop.is_set()

    def interrupt(self) -> bool:
        """End the answer that is being given; False where there is none, or where it is asked for the second time."""
        if not self._busy or self._stop.is_set():
            return False
        self._stop.set()
        return True


class Tty(Pipe):
    """A terminal. Ctrl-C arrives as a key here and not as a signal, which would end torchrun and with it all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self._keys = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._keys)
        settings = termios.tcgetattr(self._keys)
        settings[6][termios.VINTR] = _NO_KEY
        termios.tcsetattr(self._keys, termios.TCSADRAIN, settings)
        atexit.register(self.close)
        with contextlib.suppress(ImportError):
            import readline

            readline.parse_and_bind(r'"\C-c": kill-whole-line')

    def close(self) -> None:
        """Leave the terminal as it was before."""
        termios.tcsetattr(self._keys, termios.TCSANOW, self._before)
        sys.stdout.write(PLAIN)
        sys.stdout.flush()

    def ask(self) -> str | None:
        try:
            return input("\n> ").replace("\x03", "")
        except EOFError:
            return None

    def say(self, text: str, thought: bool = False) -> None:
        super().say(f"{DIM}{text}{PLAIN}" if thought else text)

    def note(self, text: str) -> None:
        super().note(f"{DIM}{text}{PLAIN}")

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Read keys one by one, and show none."""
        settings = termios.tcgetattr(self._keys)
        busy = termios.tcgetattr(self._keys)
        busy[3] &= ~(termios.ICANON | termios.ECHO)
        termios.tcsetattr(self._keys, termios.TCSADRAIN, busy)
        try:
            with super().answering():
                yield
        finally:
            termios.tcsetattr(self._keys, termios.TCSADRAIN, settings)

    @property
    def interrupted(self) -> bool:
        while select.select([self._keys], [], [], 0)[0]:
            typed = os.read(self._keys, 1024)
            if not typed:
                break
            if _CTRL_C in typed:
                self._stop.set()
        return super().interrupted


def terminal() -> Pipe:
    """Return a terminal where both ends are one, else a pipe."""
    return Tty() if sys.stdin.isatty() and sys.stdout.isatty() else Pipe()
