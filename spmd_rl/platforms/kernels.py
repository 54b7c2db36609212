"""Say what the kernels of a machine keep in memory, and what else it takes: `plan` counts with it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kernels:
    """Hold what a platform's building blocks leave in memory between a forward and a backward pass."""

    norm_copies: int = 1
    """Of a norm's input: a fused one keeps its output alone (the input is another's), torch's own the normed rows too.
    """
    weighed_copies: int = 0
    """Of the channels of experts: the gate that the router's weight multiplies, where its gradient is not made from the
    gate's input."""
    one_call: bool = True
    """Attention is one call for all sequences, and shared prompts are gathered keys; else the samples that share a
    prompt are a padded batch."""
    heap: float = 1.0
    """Bytes that the process holds for each byte of activations. The C library of CPUs' machines finds few of the
    blocks again that torch's aligned allocations have freed: measured 1.37 and 1.41 (glibc 2.36, docs/plan.md)."""
    stays: bool = False
    """Models, optimizers and what they hold stay where they are: there is one memory."""
    libraries: int = 3 << 30
    """Bytes of a device that its context, compiled kernels and the collectives' buffers take; of a host's memory, what
    a process loads once it has started."""
    engine: int = 0
    """Of a host's memory, what an engine takes beside weights and cache. Models are built and read before it is."""
    share: float = 0.97
    """Part of a device's memory that can be counted on: what is left is lost to fragments."""
