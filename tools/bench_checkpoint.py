"""Measure what a checkpoint costs training: `torchrun --nproc_per_node 2 tools/bench_checkpoint.py --model.path DIR`.

In one run, on the same ranks and the same state, in turn: saves that are waited for, and saves in the background. Takes
the settings of spmd_rl.grpo. Prints on rank 0 how long training is kept from going on, what host memory a save takes on
top (the proportional set size of a rank and its writers), bytes, and bytes a second.
"""

import gc
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
ROUNDS = 5
STEPS_BEFORE = 2
MIB = 2**20


def main() -> None:
    from spmd_rl.config.loading import load_config
    from spmd_rl.models.model_shape import read_model_shape
    from spmd_rl.platforms import current

    config = load_config(sys.argv[1:])
    shape = read_model_shape(config.model.path)
    platform = current(config.run.platform)
    platform.set_environment()
    from spmd_rl.patches import megatron_core, torch_gloo
    from spmd_rl.patches.patch import apply_all

    apply_all(megatron_core.PATCHES + torch_gloo.PATCHES, platform.patches)
    from spmd_rl.distributed import world as worlds

    world = worlds.start(platform, 600)
    bench = Bench(config, shape, platform, world)
    lines = bench.run()
    if world.rank == 0:
        print("\n".join(lines), flush=True)


class Bench:
    """One rank of the benchmark."""

    def __init__(self, config: Any, shape: Any, platform: Any, world: Any) -> None:

        from spmd_rl.worker.shard_saver import ShardSaver
        from spmd_rl.worker.trainer import Trainer

        self.trainer = Trainer(config, shape, platform.device(world.local_rank), world)
        self.learner = self.trainer.learners["policy"]
        self.saver = ShardSaver(self.trainer.learners, world)
        self.world, self.layout = world, self.trainer.layout
        made = tempfile.mkdtemp(prefix="checkpoint_", dir=os.environ.get("BENCH_DIR")) if world.rank == 0 else ""
        self.root = Path(self._all(made)[0])
        self._samples(shape.vocabulary, self.trainer.place.data_rank)

    def _samples(self, vocabulary: int, data_rank: int) -> None:
        """Return what training steps are made on: 4 random samples, the same on all ranks."""
        import torch

        from spmd_rl.controller.planner import plan_microbatches
        from spmd_rl.data.tickets import Ticket
        from spmd_rl.distributed.sample import Sample

        draw = torch.Generator().manual_seed(3)
        held, tickets = {}, []
        for name in range(4):
            prompt, response = (torch.randint(3, vocabulary, (16,), generator=draw) for _ in range(2))
            held[name] = Sample.of(name, prompt, response, rollout_logprobs=torch.full((16,), -6.0))
            held[name].put("advantages", 0.1)
            held[name].put("weights", 1.0 / 64)
            tickets.append(Ticket(name, name, 16, 16, 16, "stop"))
        plan = plan_microbatches(tickets, self.layout.data, 1, 256, False)
        mine = plan.minibatches[0].microbatches[data_rank]
        self.trainer.packs = [
            self.trainer.pack([[[held[i] for i in group] for group in batch] for batch in mine], False)
        ]
        for model in self.trainer.models:
            self.trainer.score(model)

    def _all(self, value: Any) -> list[Any]:
        from spmd_rl.distributed.gather import gather

        return gather(value, self.world.payload)

    def step(self) -> float:
        """One training step; its seconds."""
        started = time.perf_counter()
        self.trainer.learn("policy", 0, 1e-6)
        self.learner.gradients.release()  # as every switch to rollout does
        return time.perf_counter() - started

    def begin(self, number: int) -> tuple[Path, float]:
        """Begin to save; the seconds that this took."""
        directory = self.root / f"{number:03d}"
        if self.world.rank == 0:
            directory.mkdir()
        self._all(None)
        started = time.perf_counter()
        self.saver.begin_checkpoint(str(directory))
        return directory, time.perf_counter() - started

    def waited_for(self, number: int) -> tuple[float, int]:
        """A synchronous save: seconds until all is written, and read again for its digests; the bytes of all ranks."""
        directory, seconds = self.begin(number)
        started = time.perf_counter()
        self._progress(True)
        self.written = seconds + time.perf_counter() - started
        self._digests(directory, True)
        seconds += time.perf_counter() - started
        self._all(None)
        size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
        self._remove(directory)
        return seconds, size

    def beside(self, number: int) -> tuple[float, float, list[float]]:
        """A save in the background: seconds in which training waited, of these at the beginning; steps' seconds."""
        directory, begun = self.begin(number)
        blocked, steps = begun, []
        written = complete = False
        while not complete:
            steps.append(self.step())
            self._all(None)  # the ranks end a step together; what one is slower by is the step's
            started = time.perf_counter()
            written = written or self._progress(False)
            complete = written and self._digests(directory, False)
            blocked += time.perf_counter() - started
        self._remove(directory)
        return blocked, begun, steps

    def _progress(self, wait: bool) -> bool:
        """As rank 0 would ask for it: all have written, or not."""
        answer = self.saver.checkpoint_progress(wait)
        assert answer.failed is None, answer.failed
        return answer.written

    def _digests(self, directory: Path, wait: bool) -> bool:
        """Ask for digests of all files of a checkpoint, shared over the ranks; False while they are not all there."""
        names = sorted(str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file())
        mine = self.saver.checkpoint_digests(str(directory), names, wait)
        return all(self._all(mine is not None))

    def _remove(self, directory: Path) -> None:
        self._all(None)
        if self.world.rank == 0:
            shutil.rmtree(directory)
        self._all(None)

    def run(self) -> list[str]:
        for _ in range(STEPS_BEFORE):
            self.step()
        gc.collect()
        gc.freeze()  # as program.py does
        first, _ = self.waited_for(0)  # plans are made and kept
        quiet = [self.step() for _ in range(STEPS_BEFORE)]
        with Memory() as still:
            quiet += [self.step() for _ in range(STEPS_BEFORE)]
        waited, written, beside = [], [], []
        size = 0
        for turn in range(ROUNDS):
            seconds, size = self.waited_for(2 * turn + 1)
            waited.append(seconds)
            written.append(self.written)
            beside.append(self.beside(2 * turn + 2))
        with Memory() as saving:  # not while the clock runs: looking takes the interpreter
            self.beside(2 * ROUNDS + 1)
        return self._told(first, waited, written, beside, saving.peak - still.peak, quiet, size)

    def _told(
        self,
        first: float,
        waited: list[float],
        written: list[float],
        beside: list[tuple[float, float, list[float]]],
        memory: int,
        quiet: list[float],
        size: int,
    ) -> list[str]:
        mine = {
            "first": first,
            "waited": statistics.median(waited),
            "written": statistics.median(written),
            "blocked": statistics.median(blocked for blocked, _, _ in beside),
            "begun": statistics.median(begun for _, begun, _ in beside),
            "memory": memory,
            "shard": self.saver.checkpoint_bytes(),
            "quiet": statistics.median(quiet),
            "busy": statistics.median(step for _, _, steps in beside for step in steps),
        }
        everyone = self._all(mine)
        shutil.rmtree(self.root, ignore_errors=True)
        # The slowest rank is what training waits for.
        worst = {name: max(each[name] for each in everyone) for name in mine}
        ratio = worst["blocked"] / worst["waited"]
        return [
            f"{self.world.size} ranks, {self.layout}",
            f"a checkpoint's files            {size / MIB:9.0f} MiB, {size / worst['written'] / MIB:.0f} MiB/s",
            f"a rank's shard                  {worst['shard'] / MIB:9.0f} MiB",
            f"synchronous save                {worst['waited']:9.3f} s  ({worst['written']:.3f} s of it to write, "
            f"the rest to read again; the first {worst['first']:.3f} s)",
            f"asynchronous save blocks        {worst['blocked']:9.3f} s  {ratio:.1%} of it "
            f"({worst['begun']:.3f} s of it at the beginning)",
            f"a step, and beside a save       {worst['quiet']:9.3f} s, {worst['busy']:.3f} s",
            "host memory on top, by rank     "
            + ", ".join(f"{each['memory'] / MIB:.0f} MiB ({each['memory'] / each['shard']:.2f}x)" for each in everyone),
        ]


class Memory:
    """The peak, inside, of this process's proportional memory and that of all that it has started."""

    def __init__(self) -> None:
        self.peak, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        own = psutil.Process()
        while not self._over.is_set():
            total = 0
            for process in [own, *own.children(recursive=True)]:
                try:
                    text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
                except OSError:  # it has ended
                    continue
                total += sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:"))
            self.peak = max(self.peak, total)
            self._over.wait(0.05)


if __name__ == "__main__":
    main()
