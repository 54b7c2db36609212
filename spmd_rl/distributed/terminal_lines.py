"""Write to a terminal that another process shows a progress bar on, in whole lines, or to a reader that may leave."""

import signal
import sys
from typing import TextIO

_ERASE = "\r\x1b[2K"
"""Takes the bar away; whoever shows it draws it anew below."""


class TerminalLines:
    """Stand for a stream of a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._open = ""

    def write(self, text: str) -> int:
        """Write what has its end; the rest waits for it, or for `flush`."""
        whole, newline, self._open = (self._open + text).rpartition("\n")
        if newline:
            self.stream.write("".join(f"{_ERASE}{line}\n" for line in whole.split("\n")))
            self.stream.flush()
        return len(text)

    def flush(self) -> None:
        """Write what has no end yet, too."""
        if self._open:
            self.stream.write(_ERASE + self._open)
            self._open = ""
        self.stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


def share_terminal() -> None:
    """Write this process' lines, where they go to a terminal, in the place of another process' bar."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream.isatty() and not isinstance(stream, TerminalLines):
            setattr(sys, name, TerminalLines(stream))


def end_with_reader() -> None:
    """End this process, which only prints, without a word when its reader has seen enough, as head has."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
