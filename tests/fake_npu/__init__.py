"""A node of NPUs on a CPU: vendor packages of the same names, whose device is the host.

`vendor/torch_npu` and `vendor/vllm_ascend` do what the program meets in the published wheels: torch.cuda that becomes
torch.npu, fused operators held to their documentation, weights of experts that lie transposed, a sleep that loses what
is no parameter and no buffer. The program's record of NPUs runs on them as it is, but for its device, the host, and its
collectives, gloo's.
"""

import sys
from dataclasses import replace
from pathlib import Path

VENDOR = Path(__file__).parent / "vendor"
PLUGIN = "[vllm.platform_plugins]\nascend = vllm_ascend:register\n"
INSTALLED = {"torch_npu": ("2.10.0.post4", ""), "vllm": ("0.23.0", ""), "vllm_ascend": ("0.23.0", PLUGIN)}
"""Distribution -> its version, as the program's patches ask for it, and its entry points."""


def install(directory: Path) -> None:
    """Have this process and those forked from it find NPUs; `directory`: for what pip writes of a package."""
    from spmd_rl.platforms import npu

    for name, (version, points) in INSTALLED.items():
        about = directory / f"{name}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (about / "entry_points.txt").write_text(points)
    sys.path[:0] = [str(directory), str(VENDOR)]
    npu.glob = lambda pattern: ["/dev/davinci0", "/dev/davinci1"]
    npu.NPU = replace(npu.NPU, device_type="cpu", backend="gloo", visible_devices_variable="")
