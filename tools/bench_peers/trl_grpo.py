"""Measure one peer on the workload of the CPU benchmark: TRL's GRPOTrainer with vLLM in the same process.

Run under torchrun, one process a rank, CPU and gloo. Rank 0 prints one JSON line a step, then a summary over all steps
but the first; every rank prints its peak memory. README.md beside this file says what is measured and what is changed.
"""

import argparse
import json
import os
import random
import re
import resource
import time

# Read while vllm is imported: the engine lives in this process, and its threads are torchrun's (OMP_NUM_THREADS).
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB a rank
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch.distributed as dist
import transformers
import trl.generation.vllm_generation as trl_vllm
import trl.trainer.utils as trl_utils
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face directory of the model")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps; the first is left out of the summary")
    parser.add_argument("--prompts", type=int, default=8, help="prompts a step, over all ranks")
    parser.add_argument("--samples", type=int, default=8, help="samples a prompt")
    parser.add_argument("--response-tokens", type=int, default=32, help="most new tokens a sample")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples a forward and backward pass, on one rank")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--block-tokens", type=int, default=32, help="KV block of vLLM; prefix hits are whole blocks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--sampling-correction",
        action="store_true",
        help="TRL's default: one more forward pass over all samples, to weigh by policy over vLLM probability. "
        "Also prints their difference, the proof that the weight refresh is right",
    )
    parser.add_argument(
        "--head-on-responses",
        action="store_true",
        help="run the LM head on response positions only, as TRL does on a GPU; on a CPU it runs it on all positions",
    )
    arguments = parser.parse_args()
    per_pass = arguments.micro_batch * int(os.environ.get("WORLD_SIZE", "1"))
    if arguments.prompts * arguments.samples % per_pass:
        raise ValueError(
            f"--prompts x --samples = {arguments.prompts * arguments.samples}: must be divisible by --micro-batch x "
            f"ranks = {per_pass}; choose a --micro-batch that divides the samples of a rank"
        )
    return arguments


def one_digit_sums(seed: int) -> Dataset:
    """All 100 sums of two digits, shuffled; columns prompt (one user message) and answer."""
    pairs = [(a, b) for a in range(10) for b in range(10)]
    random.Random(seed).shuffle(pairs)
    wording = "What is {} + {}? Answer with the number only."
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": wording.format(a, b)}], "answer": a + b} for a, b in pairs]
    )


def last_number_is_sum(completions: list, answer: list[int], **_) -> list[float]:
    """Reward 1.0 where the last number of the response equals the sum, else 0.0."""
    found = [NUMBER.findall(completion[0]["content"]) for completion in completions]
    return [float(bool(numbers) and float(numbers[-1]) == right) for numbers, right in zip(found, answer, strict=True)]


def engine_factory(block_tokens: int):
    """vLLM's LLM with the arguments TRL has no setting for: no compilation (as in the compared run), fp32, KV block."""
    plain = trl_vllm.LLM

    def engine(**settings):
        return plain(**settings, enforce_eager=True, dtype="float32", block_size=block_tokens)

    return engine


def refresh_whole_model(generation: trl_vllm.VLLMGeneration) -> None:
    """Replace VLLMGeneration.sync_weights, which loads one parameter a call.

    On a CPU vLLM has packed the loaded weights for its matrix kernels, so a parameter no longer has the shape that its
    loader wants. The engine's own reload_weights unpacks, loads and packs again, from one pass over the parameters.
    """
    generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": generation._iter_named_params()})
    generation.llm.collective_rpc(repack_tied_head)
    generation.llm.reset_prefix_cache()


def repack_tied_head(worker) -> None:
    """A tied lm_head keeps a packed copy of the embedding, which reload_weights leaves as it was."""
    model = worker.model_runner.get_model()
    if model.config.tie_word_embeddings:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


class Stopwatch(transformers.TrainerCallback):
    """Wall seconds and tokens of each step, on this rank and over all ranks."""

    def __init__(self):
        self.trainer = None
        self.steps = []
        self.row = {}
        self.step_started = self.scored_at = 0.0

    def attach(self, trainer: GRPOTrainer) -> None:
        self.trainer = trainer
        trainer.add_callback(self)
        generation = trainer.vllm_generation
        generate, refresh, score = generation.generate, generation.sync_weights, trainer._generate_and_score_completions

        def timed_generate(prompts, *args, **kwargs):
            started = time.perf_counter()
            made = generate(prompts, *args, **kwargs)
            self.row["rollout_seconds"] = time.perf_counter() - started
            self.row["prompt_tokens"] = sum(map(len, prompts))
            self.row["response_tokens"] = sum(map(len, made[1]))
            return made

        def timed_refresh():
            started = time.perf_counter()
            refresh()
            self.row["refresh_seconds"] = time.perf_counter() - started

        def timed_score(inputs):
            started = time.perf_counter()
            batch = score(inputs)
            self.scored_at = time.perf_counter()
            in_engine = self.row["rollout_seconds"] + self.row["refresh_seconds"]
            self.row["scoring_seconds"] = self.scored_at - started - in_engine
            return batch

        generation.generate, generation.sync_weights = timed_generate, timed_refresh
        trainer._generate_and_score_completions = timed_score

    def on_train_begin(self, args, state, control, **_):
        dist.barrier()
        self.step_started = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        now = time.perf_counter()
        self.row |= {"seconds": now - self.step_started, "training_seconds": now - self.scored_at}
        rows = [None] * dist.get_world_size()
        dist.all_gather_object(rows, self.row)
        self.steps.append(over_ranks(rows) | self.learning())
        if dist.get_rank() == 0:
            print(json.dumps({"step": state.global_step} | self.steps[-1]), flush=True)
        self.row = {}
        self.step_started = time.perf_counter()  # the gathering above belongs to no step

    def learning(self) -> dict[str, float]:
        """Mean reward of the step, and vLLM's distance from the policy's log-probabilities where TRL computes both."""
        metrics = self.trainer._metrics["train"]
        wanted = ("reward", "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max")
        return {name: metrics[name][-1] for name in wanted if metrics.get(name)}


def over_ranks(rows: list[dict]) -> dict[str, float]:
    """One row from one a rank: the slowest rank's seconds, all ranks' tokens.

    A fast rank waits for the others while it scores, so the least scoring time is the true one.
    """
    row = {name: max(r[name] for r in rows) for name in ("seconds", "rollout_seconds", "refresh_seconds")}
    row["scoring_seconds"] = min(r["scoring_seconds"] for r in rows)
    row["training_seconds"] = max(r["training_seconds"] for r in rows)
    row = {name: round(seconds, 2) for name, seconds in row.items()}
    row["response_tokens"] = sum(r["response_tokens"] for r in rows)
    row["tokens"] = row["response_tokens"] + sum(r["prompt_tokens"] for r in rows)
    return row | {"tokens_per_second": round(row["tokens"] / row["seconds"], 2)}


def summary(steps: list[dict]) -> dict[str, float]:
    """Means over the steps given; tokens_per_second is all tokens over all seconds."""
    names = [name for name in steps[0] if name.endswith(("seconds", "tokens"))]
    means = {name: round(sum(step[name] for step in steps) / len(steps), 2) for name in names}
    rate = sum(step["tokens"] for step in steps) / sum(step["seconds"] for step in steps)
    return {"steps_measured": len(steps)} | means | {"tokens_per_second": round(rate, 2)}


def settings(arguments: argparse.Namespace) -> GRPOConfig:
    """TRL's own settings: every cost that the compared run does not pay is switched off."""
    samples = arguments.prompts * arguments.samples
    world_size = int(os.environ["WORLD_SIZE"])
    return GRPOConfig(
        output_dir=os.path.join(os.environ.get("TMPDIR", "/tmp"), "bench_trl_grpo"),
        max_steps=arguments.steps,
        seed=arguments.seed,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        bf16=False,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        gradient_checkpointing=False,
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=samples // (arguments.micro_batch * world_size),  # one optimizer step a rollout
        num_generations=arguments.samples,
        max_completion_length=arguments.response_tokens,
        temperature=1.0,
        beta=0.0,
        loss_type="dapo",  # mean over all response tokens of the step
        scale_rewards="group",
        vllm_importance_sampling_correction=arguments.sampling_correction,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        use_vllm=True,
        vllm_mode="colocate",
        vllm_tensor_parallel_size=1,
        vllm_max_model_length=128,
        vllm_enable_sleep_mode=False,
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
    )


def main() -> None:
    arguments = parse_arguments()
    trl_vllm.LLM = engine_factory(arguments.block_tokens)
    trl_vllm.VLLMGeneration.sync_weights = refresh_whole_model
    if arguments.head_on_responses:
        trl_utils._use_triton = lambda device: True  # in this module it only chooses the positions that are scored
    trainer = GRPOTrainer(
        model=arguments.model,
        reward_funcs=last_number_is_sum,
        args=settings(arguments),
        train_dataset=one_digit_sums(arguments.seed),
    )
    stopwatch = Stopwatch()
    stopwatch.attach(trainer)
    trainer.train()
    rank = dist.get_rank()
    if rank == 0:
        print(json.dumps({"summary": summary(stopwatch.steps[1:] or stopwatch.steps)}), flush=True)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"rank": rank, "peak_rss_gib": round(peak_kib / 2**20, 2)}), flush=True)


if __name__ == "__main__":
    main()
