"""Hold the figures of devices, as their makers publish them, and what of them is reached."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Hold one device: a GPU, a die of an NPU, a core."""

    name: str
    platform: str
    """As run.platform."""
    memory: int | None
    """Bytes; None: a core shares the machine's."""
    flops: float
    """Dense products in bfloat16 a second (on a core in float32)."""
    bandwidth: float
    """Bytes a second of its memory."""
    link: float
    """Bytes a second, one way, to devices of its node."""
    network: float
    """Bytes a second, one way, to other nodes."""
    host: float
    """Bytes a second between it and its host's memory."""
    source: str
    efficiency: float = 0.4
    """Part of `flops` that passes over layers reach; an assumption, see docs/plan.md."""
    decode: float = 0.5
    """Part of `bandwidth` that the engine reaches while it writes a token a step; an assumption too."""
    layer_seconds: float = 5e-4
    """The least that a layer of the engine takes in a step, however little it computes: an assumption of layers that
    the host starts one by one; with graphs less."""
    wire: float = 0.7
    """Part of a link that large messages reach."""


_GIB, _GIGA, _TERA = 1 << 30, 1e9, 1e12
DEVICES = {
    device.name: device
    for device in (
        Device(
            "a2",
            "npu",
            64 * _GIB,
            313 * _TERA,
            1.6 * _TERA,
            28 * 7 * _GIGA,
            25 * _GIGA,
            25 * _GIGA,
            "Atlas 800T A2 (Ascend 910B3): 313 TFLOPS in FP16, 64 GB of HBM at 1.6 TB/s, seven HCCS links of 28 GB/s a "
            "way, one 200GE port a device, PCIe 4.0 x16; no public data sheet was found, and verl counts 354 TFLOPS "
            "for a 910B (https://github.com/volcengine/verl, utils/flops_counter.py)",
        ),
        Device(
            "a3",
            "npu",
            64 * _GIB,
            376 * _TERA,
            1.6 * _TERA,
            196 * _GIGA,
            25 * _GIGA,
            25 * _GIGA,
            "Atlas 900 A3 SuperPoD (Ascend 910C), one of a card's two dies: 376 TFLOPS in BF16, 64 GB of HBM at "
            "1.6 TB/s, 196 GB/s of the unified bus a way (CloudMatrix384, https://arxiv.org/abs/2506.12708), 200 "
            "Gbit/s of RDMA; between nodes the slower of the two is counted",
        ),
        Device(
            "h100",
            "cuda",
            80 * _GIB,
            989.4 * _TERA,
            3.35 * _TERA,
            450 * _GIGA,
            50 * _GIGA,
            55 * _GIGA,
            "NVIDIA H100 SXM: 989.4 TFLOPS in BF16 (dense), 80 GB of HBM3 at 3.35 TB/s, NVLink 900 GB/s both ways "
            "together, one 400 Gbit/s port a device, PCIe 5.0 x16 "
            "(https://www.nvidia.com/en-us/data-center/h100/, which counts sparse products, twice as many)",
            layer_seconds=5e-5,
        ),
        Device(
            "h200",
            "cuda",
            141 * 10**9,
            989.4 * _TERA,
            4.8 * _TERA,
            450 * _GIGA,
            50 * _GIGA,
            55 * _GIGA,
            "NVIDIA H200 SXM: 989.4 TFLOPS in BF16 (dense), 141 GB of HBM3e at 4.8 TB/s, NVLink 900 GB/s both ways "
            "together, one 400 Gbit/s port a device, PCIe 5.0 x16 "
            "(https://www.nvidia.com/en-us/data-center/h200/, which counts sparse products, twice as many)",
            layer_seconds=5e-5,
        ),
        Device(
            "cpu",
            "cpu",
            None,
            140 * _GIGA,
            10 * _GIGA,
            2 * _GIGA,
            1 * _GIGA,
            10 * _GIGA,
            "one core with two AVX-512 units at 2.2 GHz: 64 operations in float32 a cycle; a core's share of the "
            "memory's bandwidth, gloo through the loopback, 10 Gbit/s Ethernet",
            efficiency=0.3,
        ),
    )
}
