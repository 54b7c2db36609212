"""Time a refresh: `torchrun --nproc_per_node 4 tools/bench_refresh.py --model.path DIR --parallel.pipeline 2`.

In one run, on the same ranks and engines, in turn: this program's refresh (plan, move, proof, and what the engine does
with new weights); the refresh that gathers every full tensor on every rank and gives it to the engine's own loader; as
the floor, a plain copy of the engine's bytes into new memory. Takes the settings of spmd_rl.grpo.
"""

import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
ROUNDS = 5


def main() -> None:
    from spmd_rl.config.loading import load_config
    from spmd_rl.models.model_shape import read_model_shape
    from spmd_rl.platforms import current

    config = load_config(sys.argv[1:])
    shape = read_model_shape(config.model.path)
    platform = current(config.run.platform)
    platform.set_environment()
    from spmd_rl.patches import megatron_core, torch_gloo, vllm
    from spmd_rl.patches.patch import apply_all

    apply_all(megatron_core.PATCHES + vllm.PATCHES + torch_gloo.PATCHES, platform.patches)
    from spmd_rl.distributed import world as worlds

    world = worlds.start(platform, 600)
    bench = Bench(config, shape, platform, world)
    bench.run()


class Bench:
    """One rank of the benchmark."""

    def __init__(self, config: Any, shape: Any, platform: Any, world: Any):
        import torch

        from spmd_rl.distributed.layout import RolloutLayout, TrainLayout
        from spmd_rl.rollout.engine import Engine
        from spmd_rl.weights.families import megatron_shard, vllm_shard
        from spmd_rl.weights.files.hf_reader import load_shard
        from spmd_rl.weights.transfer.boxes import common_boxes
        from spmd_rl.weights.transfer.checksum import Checksums
        from spmd_rl.weights.transfer.transfer_schedule import Schedule, bucket_of_bytes
        from spmd_rl.weights.transfer.weight_transfer import WeightTransfer

        self.config, self.shape, self.platform, self.world = config, shape, platform, world
        self.train = TrainLayout.of(config.parallel, world.size)
        self.rollout = RolloutLayout.of(config.rollout, world.size)
        rank, ranks = world.rank, range(world.size)
        self.sources = [megatron_shard(shape, self.train, other) for other in ranks]
        self.destinations = [vllm_shard(shape, self.rollout, other) for other in ranks]
        dtype = getattr(torch, config.model.dtype)
        self.policy = {name: torch.empty(size, dtype=dtype) for name, size in self.sources[rank].params.items()}
        load_shard(config.model.path, self.sources[rank], self.policy, shape)
        self.engine = Engine(
            config.model.path,
            shape,
            config.model.dtype,
            self.rollout,
            max_tokens=256,
            max_sequences=4,
            cache_bytes=16 << 20,
            block_tokens=config.rollout.block_tokens,
            needs_text=False,
            seed=0,
            platform=platform,
        )
        self.engine.sleep()
        started = time.perf_counter()
        bucket = config.rollout.refresh_bucket_mib
        bucket_bytes = int(bucket * 2**20) if bucket else platform.bucket_bytes
        self.mover = WeightTransfer(
            Schedule(
                self.sources, self.destinations, world.ranks_per_node, bucket_of_bytes(bucket_bytes, dtype.itemsize)
            ).plan(rank),
            self.sources[rank],
            control=world.payload,
            sources=self.sources,
        )
        self.planned = time.perf_counter() - started
        boxes = common_boxes([*self.sources, *self.destinations])
        self.trained = Checksums(self.sources[rank], boxes, "training")
        self.rolled_out = Checksums(self.destinations[rank], boxes, "rollout")
        self.gather = GatherEverything(shape, self.train, self.destinations[rank], world)
        self.seconds: dict[str, float] = {}
        self.turn: int | None = None

    def ours(self) -> int:
        """The refresh of worker/device_switch.py."""
        from spmd_rl.weights.transfer.checksum import verify

        spent = {"proof": 0.0, "engine's packing": 0.0, "proof, working": 0.0}
        begun = time.process_time()

        def timed(what: str, act: Callable[[], Any]) -> None:
            started, worked = time.perf_counter(), time.process_time()
            act()
            spent[what] += time.perf_counter() - started
            if what == "proof":  # the rest of its time a rank waits for others, or for a core
                spent["proof, working"] += time.process_time() - worked

        self.engine.wake_weights()
        engine = self.engine.weights
        for side in (self.trained, self.rolled_out):
            side.forget(self.turn)

        def written(name: str) -> None:
            timed("proof", lambda: self.rolled_out.update(name, engine[name]))
            timed("engine's packing", lambda: engine.written(name))

        traffic = self.mover.run(self.policy, engine, written)
        timed("proof", lambda: self.trained.update_all(self.policy))
        timed("proof", lambda: verify([self.trained, self.rolled_out], self.world.size, self.world.payload))
        self.engine.weights.end()
        self.seconds = spent | {"working": time.process_time() - begun}
        return traffic.network_bytes

    def gathered(self) -> int:
        """Every full tensor on every rank, one after the other, through the engine's loader."""
        self.engine.wake_weights()
        received = self.gather.refresh(self.policy, self.engine)
        self.engine.weights.end()
        return received

    def copied(self) -> int:
        """The engine's bytes, once, into new memory."""
        import torch

        sizes = self.destinations[self.world.rank].params
        wanted = sum(torch.Size(size).numel() for size in sizes.values())
        kept: list[Any] = []
        while wanted > 0:  # the trainer's tensors, as often as the engine's bytes need
            for tensor in self.policy.values():
                part = tensor.flatten()[:wanted]
                kept.append(part.clone())
                wanted -= len(part)
                if wanted <= 0:
                    break
        return 0

    def measure(self, act: Callable[[], int]) -> tuple[float, int, int]:
        """Seconds of the slowest rank; of the worst rank the bytes received, and the memory needed only meanwhile."""
        import torch.distributed as dist

        from spmd_rl.distributed.gather import gather

        self.engine.wake_cache()
        self.engine.sleep()
        self.platform.give_back_memory()
        dist.barrier(group=self.world.payload)
        before = self.platform.memory_bytes()
        self.platform.reset_peak_memory()
        started = time.perf_counter()
        received = act()
        seconds = time.perf_counter() - started
        peak = self.platform.peak_memory_bytes()
        self.platform.give_back_memory()
        extra = peak - max(before, self.platform.memory_bytes())
        everyone = gather((seconds, received, extra), self.world.payload)
        return tuple(max(values) for values in zip(*everyone, strict=True))  # type: ignore[return-value]

    def run(self) -> None:
        """All three in turn, a first time to warm up; print medians."""
        import torch.distributed as dist

        gc.collect()
        gc.freeze()  # as program.py does
        acts = {"this refresh": self.ours, "gather everything": self.gathered, "copy (floor)": self.copied}
        found: dict[str, list[tuple[float, int, int]]] = {name: [] for name in acts}
        parts: list[dict[str, float]] = []
        for turn in range(ROUNDS + 1):
            self.turn = turn or None
            for name, act in acts.items():
                one = self.measure(act)
                if turn:
                    found[name].append(one)
                    if name == "this refresh":
                        parts.append(self.seconds)
        if self.world.rank == 0:
            held = sum(tensor.nbytes for tensor in self.policy.values()) / 2**20
            print(f"{self.config.model.path}: {self.train}, {self.rollout}")
            print(f"rank 0 trains {held:.0f} MiB; planned in {self.planned:.2f} s; medians of {ROUNDS}")
            print(f"{'':<22}{'seconds':>9}{'received MiB':>14}{'extra peak MiB':>16}")
            middle = {
                name: [statistics.median(values) for values in zip(*of, strict=True)] for name, of in found.items()
            }
            for name, (seconds, received, extra) in middle.items():
                print(f"{name:<22}{seconds:>9.3f}{received / 2**20:>14.0f}{extra / 2**20:>16.0f}")
            mine, theirs, floor = middle.values()
            proof = statistics.median(part["proof"] for part in parts)
            packing = statistics.median(part["engine's packing"] for part in parts)
            share = statistics.median(part["proof, working"] / part["working"] for part in parts)
            print(
                f"of this refresh on rank 0: proof {proof:.3f} s ({100 * share:.1f} % of what the rank computed), the "
                f"engine's packing {packing:.3f} s"
            )
            print(
                f"gather everything takes {theirs[0] / mine[0]:.1f} x the time, {theirs[1] / max(mine[1], 1):.1f} x "
                f"the traffic, {theirs[2] / max(mine[2], 1):.1f} x the memory of this refresh"
            )
            bare = (mine[0] - packing) / floor[0]
            print(f"this refresh takes {mine[0] / floor[0]:.2f} x the floor, {bare:.2f} x without the engine's packing")
        dist.barrier(group=self.world.control)
        self.engine.close()


class GatherEverything:
    """Each parameter gathered over the tensor group, sent to the other stages, and loaded by the engine's own code."""

    def __init__(self, shape: Any, train: Any, destination: Any, world: Any):
        import torch.distributed as dist

        from spmd_rl.weights.families import megatron_shard

        self.train, self.world = train, world
        mine = train.coords(world.rank)
        groups = {}  # all ranks make all groups, in one order
        for rank in range(world.size):
            for members in (train.tensor_ranks(rank), train.pipeline_ranks(rank)):
                if members not in groups:
                    groups[members] = dist.new_group(list(members))
        self.tensor_group = groups[train.tensor_ranks(world.rank)]
        self.stage_group = groups[train.pipeline_ranks(world.rank)]
        # For each stage: the shards of its tensor ranks.
        self.shards = [
            [megatron_shard(shape, train, train.rank(t, mine.data, stage)) for t in range(train.tensor)]
            for stage in range(train.pipeline)
        ]
        # How many elements of each engine parameter come from a Hugging Face tensor: when it is complete, it is packed.
        self.parts: dict[str, Counter[str]] = {}
        for piece in destination.pieces:
            self.parts.setdefault(piece.tensor, Counter())[piece.param] += piece.elements
        self.elements = Counter({name: sum(p.elements for p in ps) for name, ps in destination.by_param.items()})

    def refresh(self, policy: Any, engine: Any) -> int:
        """Returns the bytes that this rank received."""
        received = 0
        left = Counter(self.elements)
        writer = engine.weights

        def tensors() -> Iterator[tuple[str, Any]]:
            nonlocal received
            seen: set[str] = set()
            for name, tensor, arrived in self.full_tensors(policy):
                received += arrived
                if name in seen:  # the copy of a tied embedding on the last stage
                    continue
                seen.add(name)
                for param in self.parts.get(name, ()):
                    writer[param]  # make room
                yield name, tensor
                for param, elements in self.parts.get(name, {}).items():
                    left[param] -= elements
                    if not left[param]:
                        writer.written(param)

        engine._runner.get_model().load_weights(tensors())
        return received

    def full_tensors(self, policy: Any) -> Iterator[tuple[str, Any, int]]:
        """(Hugging Face name, full tensor, bytes received for it)."""
        import torch
        import torch.distributed as dist

        from spmd_rl.weights.transfer.boxes import view

        mine = self.train.coords(self.world.rank)
        for stage, shards in enumerate(self.shards):
            root = self.train.rank(mine.tensor, mine.data, stage)
            for param, size in shards[0].params.items():
                held = mine.pipeline == stage
                received = 0
                parts: list[Any] = []
                if held:
                    local = policy[param]
                    parts = [local]
                    if self.train.tensor > 1:
                        parts = [torch.empty(size, dtype=local.dtype) for _ in shards]
                        dist.all_gather(parts, local, group=self.tensor_group)
                        received = local.nbytes * (self.train.tensor - 1)
                dtype = next(iter(policy.values())).dtype
                extents: dict[str, tuple[int, ...]] = {}
                for shard in shards:
                    for piece in shard.by_param[param]:
                        end = tuple(a + n for a, n in zip(piece.start, piece.shape, strict=True))
                        extents[piece.tensor] = tuple(map(max, end, extents.get(piece.tensor, end)))
                for tensor, shape in extents.items():
                    full = torch.empty(shape, dtype=dtype)
                    if held:
                        for part, shard in zip(parts, shards, strict=True):
                            for piece in shard.by_param[param]:
                                if piece.tensor == tensor:
                                    box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
                                    full[box] = view(part, piece.at, piece.shape)
                    if self.train.pipeline > 1:
                        dist.broadcast(full, src=root, group=self.stage_group)
                        received += 0 if held else full.nbytes
                    yield tensor, full, received
                    received = 0


if __name__ == "__main__":
    main()
