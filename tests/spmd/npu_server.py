"""Ranks that find themselves on NPUs, forked as those of spmd/server.py are."""

import os
import tempfile
from pathlib import Path

from fake_npu import install
from spmd.server import serve


def main() -> None:
    from spmd_rl.platforms import current

    with tempfile.TemporaryDirectory() as directory:
        install(Path(directory))
        # One collective after another, as where HCCL's coalesced ones would not do.
        os.environ |= {"SPMD_RL_TEST_PLATFORM": "npu", "SPMD_RL_COALESCE": "0"}
        machine = current("npu")
        machine.set_environment()
        # Megatron-Core and vLLM are imported once for all ranks, and after the device was touched, as on a real one.
        machine.claim(0)
        serve(machine)


if __name__ == "__main__":
    main()
