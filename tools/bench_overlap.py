"""Tell how much of an update is communication that could run beside it: torchrun tools/bench_overlap.py --size smollm2

An update of a random model, for each number of micro-batches of a mini-batch; then, alone, the sum of its gradients
over the ranks, which overlap_grad_reduce would start while the last backward pass runs, and the gathering of its
weights (overlap_param_gather). What is said is the most that each could save. With gloo the ranks' own cores sum, so
that on CPUs nothing runs beside them; on devices the figures are a machine's own: run it on yours.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spmd_rl.platforms.platform import Platform
    from spmd_rl.worker.trainer import Trainer

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]
SIZES = {
    "tiny": {"hidden": 128, "ffn": 256, "layers": 2, "heads": 4, "kv_heads": 2, "vocabulary": 512},
    "smollm2": {"hidden": 576, "ffn": 1536, "layers": 30, "heads": 9, "kv_heads": 3, "vocabulary": 49152, "tied": True},
}


def update(platform: "Platform", trainer: "Trainer") -> float:
    """Return the seconds of an update, all ranks beginning and ending together."""
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    trainer.learn("policy", 0, 1e-6)
    platform.synchronize()
    dist.barrier()
    return time.perf_counter() - began


def communicate(platform: "Platform", trainer: "Trainer") -> tuple[float, float]:
    """Return the seconds of summing all gradients, and of gathering all weights, with nothing beside them."""
    import torch.distributed as dist

    learner, found = trainer.learners["policy"], []
    learner.gradients.restore()
    for act, options in (("finish_grad_sync", {}), ("start_param_sync", {"force_sync": True})):
        dist.barrier()
        began = time.perf_counter()
        for chunk in learner.wrapped:
            getattr(chunk, act)(**options)
        platform.synchronize()
        found.append(time.perf_counter() - began)
    return found[0], found[1]


def measure(platform: "Platform", trainer: "Trainer", count: int, options: argparse.Namespace) -> dict[str, object]:
    """Return what an update of so many micro-batches takes, and its communication alone, in turn."""
    from bench_update import groups_of

    vocabulary = SIZES[options.size]["vocabulary"]
    groups = groups_of(vocabulary, count, 1, options.tokens // 8, options.tokens - options.tokens // 8)
    trainer.packs = [trainer.pack([[group] for group in groups], False)]
    trainer.score("policy")
    for sample in (sample for group in groups for sample in group):
        sample.put("advantages", 1.0 if sample.id % 2 else -1.0)
        sample.put("weights", 1.0 / count / len(sample.response))
    update(platform, trainer)  # the first one finds its kernels
    turns = [(update(platform, trainer), *communicate(platform, trainer)) for _ in range(options.turns)]
    whole, sums, gathers = map(statistics.median, zip(*turns, strict=True))
    seconds = {"update": whole, "sum_gradients": sums, "gather_weights": gathers}
    most = {"overlap_grad_reduce": sums / whole, "overlap_param_gather": gathers / whole}
    return {"micro_batches": count, "seconds": seconds, "saves_at_most": most}


def main() -> int:
    """Measure on the ranks that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--tokens", type=int, default=256, help="of a micro-batch")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 4], help="of a mini-batch and rank")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--platform", default="auto")
    options = parser.parse_args()
    import torch.distributed as dist
    from bench_update import trainer_of

    from spmd_rl.patches import megatron_core, torch_gloo
    from spmd_rl.patches.patch import apply_all
    from spmd_rl.platforms import current

    platform = current(options.platform)
    platform.set_environment()
    apply_all(megatron_core.PATCHES + torch_gloo.PATCHES, platform.patches)
    from spmd_rl.distributed import world as worlds
    from spmd_rl.distributed.gather import gather
    from tiny_models import make_tiny

    world = worlds.start(platform, 600)
    dtype = "float32" if platform.device_type == "cpu" else "bfloat16"
    with tempfile.TemporaryDirectory() as place:
        model = gather(str(Path(place) / "model"))[0]
        if world.rank == 0:
            make_tiny(model, "qwen2", **SIZES[options.size])
        dist.barrier()
        trainer = trainer_of(model, platform, world, dtype)
        for count in options.micro_batches:
            said = measure(platform, trainer, count, options)
            if world.rank == 0:
                of = {"size": options.size, "ranks": world.size, "tokens": options.tokens}
                print(json.dumps(of | said), flush=True)
        dist.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
