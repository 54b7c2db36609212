"""Each collective that a run uses, on all ranks: torchrun --nproc_per_node N -m tools.bringup.collectives"""

import torch
import torch.distributed as dist

from spmd_rl.distributed import world as worlds
from spmd_rl.platforms import current
from tools.bringup.outcome import attempt, leave


def main() -> None:
    machine = current()
    machine.set_environment()
    world = worlds.start(machine, 300)
    rank, size, device = world.rank, world.size, machine.device(world.local_rank)

    def filled(count: int, value: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=device)

    def sums(dtype: torch.dtype) -> None:
        tensor = filled(1000, rank + 1, dtype)
        dist.all_reduce(tensor)
        assert (tensor == size * (size + 1) // 2).all(), tensor[:3]

    def largest() -> None:
        tensor = filled(9, rank, torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        assert (tensor == size - 1).all()

    def gathers(dtype: torch.dtype) -> None:
        whole = filled(4 * size, 0, dtype)
        dist.all_gather_into_tensor(whole, filled(4, rank, dtype))
        assert whole.view(size, 4)[:, 0].tolist() == list(range(size))

    def scatters() -> None:
        part = filled(4)
        dist.reduce_scatter_tensor(part, filled(4 * size, rank + 1))
        assert (part == size * (size + 1) // 2).all()

    def coalesced() -> None:
        parts = [filled(4) for _ in range(3)]
        with dist._coalescing_manager(device=device, async_ops=True) as works:
            for part in parts:
                dist.reduce_scatter_tensor(part, filled(4 * size, 2.0))
        works.wait()
        assert all((part == 2 * size).all() for part in parts)

    def exchanges() -> None:
        given = [other + 1 for other in range(size)]
        taken = [rank + 1] * size
        out = filled(sum(taken), -1)
        dist.all_to_all_single(out, filled(sum(given), rank), taken, given)
        assert out.view(size, rank + 1)[:, 0].tolist() == list(range(size))

    def messages() -> None:
        after, before = (rank + 1) % size, (rank - 1) % size
        got = filled(1 << 20, -1, torch.bfloat16)
        sent = filled(1 << 20, rank, torch.bfloat16)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, got, before)])
        for work in works:
            work.wait()
        assert (got == before).all()

    def from_first() -> None:
        tensor = filled(5, rank)
        dist.broadcast(tensor, 0)
        assert (tensor == 0).all()

    checks = {f"all_reduce of {dtype}": lambda dtype=dtype: sums(dtype) for dtype in (torch.float32, torch.bfloat16)}
    checks |= {f"all_gather of {dtype}": lambda dtype=dtype: gathers(dtype) for dtype in (torch.float32, torch.int32)}
    checks |= {
        "all_reduce of int64, largest": largest,
        "reduce_scatter": scatters,
        "all_to_all of unequal parts": exchanges,
        "messages to a neighbour": messages,
        "broadcast": from_first,
    }
    if dist.get_backend() != "gloo":  # which has no coalescing
        checks["coalesced reduce_scatter, as Megatron sums gradients"] = coalesced
    for name, act in checks.items():
        attempt(f"rank {rank}, {name}", act)
    dist.barrier(group=world.control)
    dist.destroy_process_group()
    leave()


if __name__ == "__main__":
    main()
