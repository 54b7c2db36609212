"""Put a rollout beside plain vLLM: `python tools/bench_rollout.py --config FILE [--section.key ...]`.

One rank, one engine, the model's own weights. In turn, `--rounds` times after one that warms up: a step's rollout as a
rank does it (requests, samples, texts, graders), and `LLM.generate` on the same requests, with vLLM's own kernels for
norms, gates and draws. Both draw the same tokens, but where rounding decides.
Prints a line of JSON for each, then the ratio of the medians: of seconds, and of the process's CPU seconds, which hold
on a machine that is not quiet; the graders' CPU seconds are apart.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd_rl.config.config import Config
from spmd_rl.controller.ranks import Ranks
from spmd_rl.data.sampling_params import SamplingParams
from spmd_rl.data.seeds import sample_seed
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.program import Rank, run_rank
from spmd_rl.runtime.startup import Inputs, configure, read_inputs

if TYPE_CHECKING:
    from spmd_rl.distributed.commands import ControlChannel
    from spmd_rl.worker.serve_worker import ServeWorker

WAYS = ("rollout", "plain")
Tokens = dict[int, list[int]]
"""Of each sample, by its number."""


@dataclass
class Bench:
    """The program of the one rank."""

    config: Config
    shape: ModelShape
    rounds: int
    platform: str = "cpu"
    directory: Path | None = None
    trains: bool = False
    begun: bool = False
    seconds: dict[str, list[dict[str, float]]] = field(default_factory=lambda: {way: [] for way in WAYS})

    def read(self) -> Inputs:
        """Read what a run reads."""
        return read_inputs(self.config)

    def build(self, rank: Rank) -> "ServeWorker":
        """Build a worker that has no trainer."""
        from spmd_rl.worker.serve_worker import ServeWorker

        config, inputs = self.config, rank.inputs
        longest = config.data.max_prompt_length + config.longest_response
        parts = rank.platform, rank.world, longest, inputs.prompts, inputs.tokenizer, rank.graders
        self.worker = ServeWorker(config, self.shape, *parts, None, inputs.images)
        return self.worker

    def control(self, channel: "ControlChannel") -> None:
        """Measure both ways in turn, on the same requests."""
        worker = self.worker
        worker.do("load", {"model": self.config.model.path})
        ways = {"rollout": self._rollout, "plain": self._plain}
        for step in range(self.rounds + 1):
            made: dict[str, Tokens] = {}
            for way in WAYS if step % 2 else reversed(WAYS):
                worker.engine.wake_cache()  # neither finds what the other has computed
                usage = self._usage()
                made[way] = ways[way](step)
                spent = {name: after - usage[name] for name, after in self._usage().items()}
                if step:
                    self.seconds[way].append(spent)
                    tokens = sum(map(len, made[way].values()))
                    print(json.dumps({"way": way, "step": step, "tokens": tokens, **spent}), flush=True)
            same = sum(tokens == made["plain"][number] for number, tokens in made["rollout"].items())
            asked = len(made["plain"])
            assert same >= 0.9 * asked, f"{same} of {asked} samples are equal, of the same requests and seeds"
        Ranks(channel, worker).stop()

    def _usage(self) -> dict[str, float]:
        import psutil

        children = [one.cpu_times() for one in psutil.Process().children(recursive=True)]
        graders = sum(one.user + one.system for one in children)
        return {"seconds": time.perf_counter(), "cpu_seconds": time.process_time(), "grader_cpu_seconds": graders}

    def _rollout(self, step: int) -> Tokens:
        """Do what a rank does in the phase."""
        worker, config = self.worker, self.config
        asked = {
            "split": "train",
            "rows": self._rows(step),
            "step": step,
            "sampling": SamplingParams.of(config.rollout),
        }
        worker.do("generate", {**asked, "samples_per_prompt": config.algorithm.samples_per_prompt})
        worker.do("rewards", {})
        made = {number: one.completion.sample.response.tolist() for number, one in worker.rollouts.made.items()}
        worker.do("forget", {})
        return made

    def _plain(self, step: int) -> Tokens:
        """Ask vLLM alone."""
        import vllm

        from spmd_rl.patches.vllm_kernels import left_as_they_are

        engine, config = self.worker.engine, self.config
        prompts, params = [], []
        for row in self._rows(step):
            prompt = self.worker.rollouts.prompts["train"][row % len(self.worker.rollouts.prompts["train"])]
            for sample in range(config.algorithm.samples_per_prompt):
                prompts.append({"prompt_token_ids": list(prompt.token_ids)})
                params.append(
                    vllm.SamplingParams(
                        temperature=config.rollout.temperature,
                        max_tokens=config.rollout.max_response_length,
                        seed=sample_seed(config.run.seed, step, row, sample),
                        stop_token_ids=sorted(engine.end_ids),
                        logprobs=0,
                        detokenize=False,
                    )
                )
        with left_as_they_are():
            outputs: list[Any] = engine.llm.generate(prompts, params, use_tqdm=False)
        return {number: list(one.outputs[0].token_ids) for number, one in enumerate(outputs)}

    def _rows(self, step: int) -> list[int]:
        count = self.config.train.prompts_per_step
        return list(range(step * count, (step + 1) * count))


def ratios(seconds: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Return how often a rollout's median is plain vLLM's."""
    found = {}
    for name in ("seconds", "cpu_seconds"):
        ours, plain = (statistics.median(one[name] for one in seconds[way]) for way in WAYS)
        found[name] = round(ours / plain, 3)
    return found


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="of both, after one that warms up")
    options, words = parser.parse_known_args()
    bench = Bench(*configure(words), options.rounds)
    run_rank(bench, lambda: None)
    print(json.dumps({"rollout / plain": ratios(bench.seconds)}))


if __name__ == "__main__":
    sys.exit(main())
