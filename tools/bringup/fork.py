"""Can a process that holds its device be copied, and the copy write? Platform.forks counts on it."""

import os
import tempfile
import time
from pathlib import Path

import torch

from tools.bringup.outcome import device_here, expect, leave

SECONDS = 60


def main() -> None:
    machine = device_here()
    there = torch.arange(1 << 20, device=machine.device(0))
    held = there.cpu()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "written"
        child = os.fork()
        if child == 0:
            torch.save(held, file)
            os._exit(0)
        deadline, status = time.monotonic() + SECONDS, None
        while time.monotonic() < deadline and status is None:
            done, code = os.waitpid(child, os.WNOHANG)
            status = code if done else None
            time.sleep(0.1)
        if status is None:
            os.kill(child, 9)
            os.waitpid(child, 0)
        expect("a copy of the process writes a file", status == 0, "it hangs" if status is None else f"status {status}")
        expect("what it wrote is whole", status == 0 and torch.equal(torch.load(file, weights_only=True), held))
    expect("the device still computes", int(there.sum()) == int(held.sum()))
    print(f"the record says forks = {machine.forks}")
    leave()


if __name__ == "__main__":
    main()
