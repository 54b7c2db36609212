"""The pool's side of one grader process."""

import math
import selectors
import socket
import time
from collections import Counter

from spmd_rl.rewards.grading.grader_process import Batch, frame
from spmd_rl.rewards.grading.lanes import Lane, Task


class Grader:
    """One grader process and the socket to it, which is never waited for."""

    def __init__(self, process: int, connection: socket.socket, lane: Lane, selector: selectors.BaseSelector) -> None:
        self.process = process
        self.lane = lane
        self.tasks: dict[int, tuple[Task, float]] = {}
        """By sample: what it is working on and when that has to be done."""
        self.answered: Counter[int] = Counter()
        """By rule: how many of its calls have ended here."""
        self.begun = 0.0
        """When the call began that it is at."""
        self.ended = False
        self.due_since: float | None = None
        """When the process that it replaces should have been done."""
        self._connection = connection
        connection.setblocking(False)
        self._selector = selector
        self._writing = False
        self._outbox = bytearray()
        self._inbox = bytearray()
        selector.register(connection, selectors.EVENT_READ, self)

    @property
    def deadline(self) -> float:
        """When the first of its samples has to be done; infinite for none."""
        return min((deadline for _, deadline in self.tasks.values()), default=math.inf)

    def give(self, tasks: list[Task], deadline: float, seconds: float) -> None:
        """Have it grade samples, in one call where there are several; `seconds`: what an asynchronous one may take."""
        self.begun = self.begun if self.tasks else time.monotonic()
        self.tasks |= {task.id: (task, deadline) for task in tasks}
        batch = Batch(self.lane.left(tasks[0]), [task.id for task in tasks], [task.sample for task in tasks], seconds)
        self._outbox += frame(batch)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now; the selector says when it takes more."""
        try:
            del self._outbox[: self._connection.send(self._outbox)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._outbox.clear()  # it has ended; reading will find that out
        if bool(self._outbox) != self._writing:
            self._writing = bool(self._outbox)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._writing else 0)
            self._selector.modify(self._connection, events, self)

    def receive(self) -> list[bytes]:
        """Return the messages that have come in whole; sets `ended` when no more will come."""
        while True:
            try:
                chunk = self._connection.recv(1 << 16)
            except BlockingIOError:
                break
            except ConnectionError:
                chunk = b""
            if not chunk:
                self.ended = True
                break
            self._inbox += chunk
        messages = []
        while len(self._inbox) >= 4:
            end = 4 + int.from_bytes(self._inbox[:4], "little")
            if len(self._inbox) < end:
                break
            messages.append(bytes(self._inbox[4:end]))
            del self._inbox[:end]
        return messages

    def close(self) -> None:
        self._selector.unregister(self._connection)
        self._connection.close()
