"""Time the planning of a refresh, and see how well it comes out: `python tools/bench_plan.py [deepseek] [llama]`.

deepseek: DeepSeek-V3 with 671 billion parameters on 384 ranks; llama: Llama with 70 billion on 128. No weights, no
device; times are of this process on one core.
"""

import resource
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import TypeVar

from spmd_rl.distributed.layout import RolloutLayout, TrainLayout
from spmd_rl.models.blocks import Experts, LatentAttention
from spmd_rl.plan.refresh_stats import refresh_stats
from spmd_rl.weights.families import megatron_shard, vllm_shard
from spmd_rl.weights.transfer.transfer_schedule import Schedule

RANKS_PER_NODE = 8
BUCKET_ELEMENTS = 128 << 20  # 256 MiB in bfloat16
T = TypeVar("T")


def shape(family: str, **sizes: object) -> SimpleNamespace:
    """Return what the tables of weights read of a model."""
    fields = {
        "tied": False,
        "qkv_bias": False,
        "qk_norm": False,
        "experts": None,
        "mla": None,
        "vision": None,
        "head": "lm",
    }
    return SimpleNamespace(family=family, **{**fields, "labels": 0, **sizes})


def deepseek() -> tuple[SimpleNamespace, TrainLayout, RolloutLayout]:
    """Twelve stages of 32 ranks that share the experts; twelve groups of 32 ranks of engines."""
    sparse = tuple(layer >= 3 for layer in range(61))
    model = shape(
        "deepseek_v3",
        **{"layers": 61, "hidden": 7168, "heads": 128, "kv_heads": 128, "head_dim": 192, "ffn": 18432},
        vocabulary=129280,
        experts=Experts(256, 8, 2048, 2048, False, sparse, "sigmoid", True, True, 8, 4, 2.5),
        mla=LatentAttention(1536, 512, 128, 64, 128),
    )
    train = TrainLayout(8, 12, 4, expert=32, layers_per_stage=(*[5] * 11, 6))
    return model, train, RolloutLayout(4, 384, data=8, expert=True)


def llama() -> tuple[SimpleNamespace, TrainLayout, RolloutLayout]:
    """Four stages of tensor 8, four replicas; 32 engines of four ranks."""
    model = shape(
        "llama",
        **{"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 8, "head_dim": 128, "ffn": 28672},
        vocabulary=128256,
    )
    return model, TrainLayout(8, 4, 4), RolloutLayout(4, 128)


def timed(what: str, do: Callable[[], T]) -> T:
    """Run it and say how much processor time it took."""
    start = time.process_time()
    result = do()
    print(f"  {what:<34}{time.process_time() - start:8.2f} s")
    return result


def bench(name: str) -> None:
    """Print the figures of one case."""
    model, train, rollout = CASES[name]()
    ranks = range(train.world)
    print(f"{name}, {train.world} ranks, buckets of {BUCKET_ELEMENTS >> 20} Mi elements")
    sources = timed("training shards of all ranks", lambda: [megatron_shard(model, train, r) for r in ranks])
    engines = timed("engine shards of all ranks", lambda: [vllm_shard(model, rollout, r) for r in ranks])
    schedule = timed("schedule", lambda: Schedule(sources, engines, RANKS_PER_NODE, BUCKET_ELEMENTS))
    timed("plan of one rank", lambda: schedule.plan(0))
    timed("plans of all ranks, one by one", lambda: [len(schedule.plan(r).rounds) for r in ranks])
    figures, _ = timed("figures of all ranks", lambda: refresh_stats(schedule))
    sent, received = [one.sent for one in figures], [one.received for one in figures]
    nodes = [sum(one.sent_far for one in figures[n : n + RANKS_PER_NODE]) for n in ranks[::RANKS_PER_NODE]]
    for what, values in (("sent by a rank", sent), ("received by a rank", received), ("leaving a node", nodes)):
        print(f"  {what + ', most / mean':<34}{max(values) * len(values) / max(1, sum(values)):8.3f}")
    least = max(sent + received) / BUCKET_ELEMENTS
    print(f"  {'rounds':<34}{schedule.rounds:8} (full buckets would take {least:.1f})")
    print(f"  {'ranks that a rank talks to, most':<34}{max(len(a.received_from | a.sent_to) for a in figures):8}")
    print(f"  {'peak memory of the process':<34}{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:8.2f} GiB")


CASES = {"deepseek": deepseek, "llama": llama}

if __name__ == "__main__":
    unknown = [name for name in sys.argv[1:] if name not in CASES]
    if unknown:
        sys.exit(f"{' '.join(unknown)}: there are {', '.join(CASES)}")
    for case in sys.argv[1:] or CASES:
        bench(case)
