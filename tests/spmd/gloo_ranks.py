"""One rank of tests/patches/test_gloo_in_place.py: sums and gathers of a buffer, in place and by gloo's own way."""

import torch

from spmd.ranks import arguments, join, ready, report


def main() -> None:
    platform = ready("megatron_core")
    world = join(platform)
    dtypes = torch.float32, torch.bfloat16
    report(world.rank, {str(dtype): _case(platform, world, dtype) for dtype in dtypes})


def _case(platform, world, dtype) -> dict:
    from megatron.core.distributed import param_and_grad_buffer as megatron

    torch.manual_seed(world.rank)
    ours = torch.randn(arguments()["elements"] * world.size).to(dtype)
    gloos = ours.clone()
    mine, own = (one.chunk(world.size)[world.rank] for one in (ours, gloos))
    options = {"group": torch.distributed.group.WORLD, "async_op": False}
    total = torch.distributed.ReduceOp.SUM
    extra = {
        "summed in place": lambda: megatron.dist_reduce_scatter_func(mine, ours, op=total, **options),
        "summed": lambda: torch.distributed.reduce_scatter_tensor(own, gloos),
    }
    extra = {name: _extra_bytes(platform, way) for name, way in extra.items()}
    sums = torch.equal(mine, own)
    more = {
        "gathered in place": lambda: megatron.dist_all_gather_func(ours, mine, **options),
        "gathered": lambda: torch.distributed.all_gather_into_tensor(gloos, own),
    }
    extra |= {name: _extra_bytes(platform, way) for name, way in more.items()}
    # Into other memory than the buffer's own part: left to gloo.
    apart = torch.empty_like(mine)
    megatron.dist_reduce_scatter_func(apart, ours, op=total, **options)
    return {
        "sums": sums,
        "weights": torch.equal(ours, gloos),
        "elsewhere": torch.equal(apart, mine * world.size),
        "extra": {name: size / ours.nbytes for name, size in extra.items()},
    }


def _extra_bytes(platform, act) -> int:
    torch.distributed.barrier()
    platform.reset_peak_memory()
    before = platform.memory_bytes()
    act()
    return platform.peak_memory_bytes() - before
