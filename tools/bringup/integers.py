"""Do sums and products of whole numbers wrap around, whatever their order? Platform.wraps_integers counts on it."""

import torch

from tools.bringup.outcome import device_here, expect, leave


def main() -> None:
    machine = device_here()
    device = machine.device(0)
    generator = torch.Generator().manual_seed(1)
    for dtype, low, high in ((torch.int32, -(2**31), 2**31 - 1), (torch.int64, -(2**63), 2**63 - 1)):
        a, b = (torch.randint(low, high, (1 << 16,), generator=generator, dtype=dtype) for _ in range(2))
        for name, act in (("product", torch.mul), ("sum", torch.add)):
            here, there = act(a, b), act(a.to(device), b.to(device)).cpu()
            expect(f"{name} of {dtype} wraps around", torch.equal(here, there), f"{(here != there).sum()} differ")
    values = torch.randint(-(2**63), 2**63 - 1, (1 << 18,), generator=generator)
    rows = torch.randint(0, 7, (len(values),), generator=generator)
    host = torch.zeros(7, dtype=torch.int64).index_add_(0, rows, values)
    for turn in range(3):
        place = torch.zeros(7, dtype=torch.int64, device=device)
        found = place.index_add_(0, rows.to(device), values.to(device)).cpu()
        expect(
            f"index_add_ of int64, time {turn + 1}", torch.equal(host, found), f"{found.tolist()}, not {host.tolist()}"
        )
    print(f"the record says wraps_integers = {machine.wraps_integers}; with passes alone it may be True")
    leave()


if __name__ == "__main__":
    main()
