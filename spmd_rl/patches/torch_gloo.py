"""One device of gloo for all of a rank's groups: each has a thread that wakes a hundred times a second."""

from datetime import timedelta

import torch.distributed as dist

from spmd_rl.patches.patch import EVERYWHERE, Patch


def share_device(original: type[dist.ProcessGroupGloo]) -> type[dist.ProcessGroupGloo]:
    """gloo's process groups, of which all but the first take the first one's devices."""
    devices: list[dist.ProcessGroupGloo.Device] = []

    class ProcessGroupGloo(original):  # type: ignore[misc]
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            if not devices:
                super().__init__(store, rank, size, timeout)  # of the interfaces that GLOO_SOCKET_IFNAME names
                devices.extend(self.options._devices)
                return
            options = original._Options()
            options._devices, options._timeout, options._threads = devices, timeout, 2 * len(devices)
            super().__init__(store, rank, size, options)

    return ProcessGroupGloo


PATCHES = (
    Patch(
        package="torch",
        versions=">=2.5",
        target="torch.distributed.distributed_c10d:ProcessGroupGloo",
        platforms=EVERYWHERE,
        reason="each of about thirty groups has a thread that looks at its sockets every 10 ms: 6 % of a rank's seconds on a CPU",
        upstream="https://github.com/pytorch/gloo/blob/main/gloo/transport/tcp/loop.cc",
        until="groups of one process share a device, or its thread sleeps until something arrives",
        make=share_device,
    ),
)
