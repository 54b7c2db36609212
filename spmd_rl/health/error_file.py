"""Write why a rank ends into the file that torchrun gave it for its report: whole or not at all.

torchrun ends with an error of its own, and without a restart, when it finds half a file: torch's handler writes in
place, and a rank may be killed meanwhile.
"""

import json
import os
import threading
import time
import traceback
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


class ErrorFileHandler(ErrorHandler):
    """Torch's handler of errors that end a rank."""

    def record_exception(self, e: BaseException) -> None:
        """Write the exception that is being handled down, where torchrun looks for it."""
        write_error(f"{type(e).__name__}: {e}", traceback.format_exc(), os.environ.get(ERROR_FILE, ""))


def write_error(message: str, stack: str, file: str) -> None:
    """Write down why this rank ends; without a file, nothing. Raises OSError when it can't be written."""
    if not file:
        return
    content = {"message": message, "extraInfo": {"py_callstack": stack, "timestamp": str(int(time.time()))}}
    new = Path(f"{file}.{threading.get_ident()}")
    new.write_text(json.dumps({"message": content}), encoding="utf-8")
    # Whoever is writing there in place writes on into a file without a name.
    new.replace(file)
