"""The platform's attention against torch's, also for values narrower than queries, without padding them."""

from itertools import accumulate

import torch

from spmd_rl.platforms import record
from spmd_rl.platforms.attention_layout import AttentionLayout, QuerySequence
from tools.bringup.outcome import attempt, device_here, expect, leave

LENGTHS = (1, 7, 128, 300, 1024)


def main() -> None:
    machine = device_here()
    ends = [0, *accumulate(LENGTHS)]
    sequences = [QuerySequence(*ends[n : n + 2]) for n in range(len(LENGTHS))]
    # A group's responses, which see the prompt before them.
    sequences.append(QuerySequence(ends[-1], ends[-1] + 50, slice(ends[-2], ends[-1])))
    total = sequences[-1].end
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        for heads, kv_heads, wide, narrow in ((8, 8, 128, 128), (8, 2, 128, 128), (4, 4, 192, 128)):
            torch.manual_seed(0)
            sizes = ((heads, wide), (kv_heads, wide), (kv_heads, narrow))
            tensors = [torch.randn(total, *size).to(dtype) for size in sizes]
            name = f"attention, {dtype}, {heads} heads, {kv_heads} of keys, widths {wide} and {narrow}"

            def run(platform, device, parts=tensors, scale=wide**-0.5):
                there = [part.clone().to(device).requires_grad_() for part in parts]
                layout = AttentionLayout(tuple(sequences), torch.device(device))
                out = platform.attention(layout)(*there, scale)
                out.float().square().sum().backward()
                return [one.detach().float().cpu() for one in (out, *(part.grad for part in there))]

            wanted = run(record("cpu"), "cpu")
            if narrow < wide:
                attempt(f"{name}: takes them", lambda run=run: run(machine, machine.device(0))[0].shape[-1])
                continue
            found = run(machine, machine.device(0))
            gaps = [
                float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, wanted, strict=True)
            ]
            expect(name, max(gaps) < bound, f"values and gradients differ by {gaps}")
    leave()


if __name__ == "__main__":
    main()
