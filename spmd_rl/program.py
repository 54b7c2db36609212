"""From a command line to a story: configuration, checks, ranks; rank 0 tells the story, the others serve."""

import gc
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_rl.config.check import check, notes
from spmd_rl.config.config import Config
from spmd_rl.config.load import dump, load_config
from spmd_rl.config.model_shape import ModelShape, read_model_shape
from spmd_rl.controller.run_log import RunLog, require_wandb_key
from spmd_rl.distributed.environment import local_rank_from_environment, rank_from_environment, size_from_environment

USER_ERROR = 2


@dataclass(frozen=True)
class Story:
    """What rank 0 needs to know beside the configuration."""

    run_dir: Path
    train_prompts: int
    eval_prompts: int
    benchmark: str
    data_parallel: int
    share_prompts: bool


Tell = Callable[[Config, Any, Story, Any], None]


def main(tell: Tell, arguments: list[str] | None = None) -> None:
    """Run one entry point on this rank; the exit status is 2 where the user can mend what is wrong."""
    _quieten()
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        config, shape = configure(sys.argv[1:] if arguments is None else arguments)
    except ValueError as error:
        _refuse(error)
    _exit_on_signals()
    from spmd_rl.distributed.peers import naming_peers

    record(naming_peers(run))(config, shape, tell)


def _quieten() -> None:
    """Leave out what the libraries say to their own developers; SPMD_RL_VERBOSE=1 shows it."""
    if os.environ.get("SPMD_RL_VERBOSE"):
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported, which is later
    warnings.filterwarnings("ignore", module=r"(torch|megatron|vllm|transformers)\b")
    for name in ("torch._library.triton", "torch.distributed.distributed_c10d", "transformers", "megatron"):
        logging.getLogger(name).setLevel(logging.ERROR)


def configure(arguments: list[str]) -> tuple[Config, ModelShape]:
    """Everything that can be wrong before any rank has met another, without torch.

    Raises ValueError that lists all problems.
    """
    config = load_config(arguments)
    shape = read_model_shape(config.model.path)
    problems = check(config, size_from_environment(), shape)
    if problems:
        raise ValueError("\n".join(problems))
    if config.run.wandb == "online":
        require_wandb_key()
    return config, shape


def run(config: Config, shape: ModelShape, tell: Tell) -> None:
    """One rank's life."""
    from spmd_rl.platforms.platform import current

    try:
        platform = current(config.run.platform)
        for name, value in platform.environment.items():
            os.environ.setdefault(name, value)
        from spmd_rl.patches import megatron_core, vllm
        from spmd_rl.patches.patch import apply_all
        from spmd_rl.rollout.options import model_options

        applied = apply_all(megatron_core.PATCHES + vllm.PATCHES, platform.name)
        model_options(config.model.path, shape, config.rollout.block_tokens, platform)
        _check_weights(config, shape)
        loaded = _read_prompts(config)
        pool = _start_graders(config, loaded.prompts["train"][0])
        from spmd_rl.distributed import world as worlds

        world = worlds.start(platform, config.run.collective_timeout_seconds)
    except ValueError as error:
        _refuse(error)
    from spmd_rl.distributed.commands import Commands
    from spmd_rl.worker.worker import Worker

    lines = applied + loaded.notes + notes(config, world.size)
    log = _start_log(config, world.size, lines) if world.rank == 0 else None
    try:
        worker = Worker(config, shape, platform, world, loaded.prompts, loaded.tokenizer, pool)
    except ValueError as error:
        _refuse(error)
    # All that exists now lives as long as the run; a full collection would look at it each time, for 0.1 s or more.
    gc.collect()
    gc.freeze()
    commands = Commands(world, config.run.control_timeout_seconds)
    if log is None:
        worker.serve(commands)
    else:
        from spmd_rl.controller.ranks import Ranks

        ranks = Ranks(commands, worker)
        story = Story(
            run_dir=log.run_dir,
            train_prompts=len(loaded.prompts["train"]),
            eval_prompts=len(loaded.prompts["eval"]),
            benchmark=_benchmark(config),
            data_parallel=config.parallel.data(world.size),
            share_prompts=config.train.share_prompts and platform.shares_prompts,
        )
        with log:
            tell(config, ranks, story, log)
        ranks.stop()
    import torch.distributed as dist

    dist.barrier(group=world.control)
    worker.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_weights(config: Config, shape: ModelShape) -> None:
    """Read the headers of all weight files: a missing, truncated or foreign one is found before anything is made."""
    from spmd_rl.weights.load import check_headers, read_headers

    for path in {config.model.path, config.model.reference_path or config.model.path}:
        check_headers(path, read_headers(path), shape)


@dataclass
class _Loaded:
    tokenizer: Any
    prompts: dict[str, list[Any]]
    notes: list[str]


def _read_prompts(config: Config) -> _Loaded:
    """Every rank reads all prompts: only their row numbers travel."""
    from spmd_rl.data.prompts import load_prompts
    from spmd_rl.data.tokens import load_tokenizer

    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    loaded = {split: load_prompts(config, tokenizer, split) for split in ("train", "eval")}
    return _Loaded(
        tokenizer,
        {split: list(part.prompts) for split, part in loaded.items()},
        [note for part in loaded.values() for note in part.notes],
    )


def _start_graders(config: Config, prompt: Any) -> Any:
    """The grader processes, tried on the first prompt's own answer: a rule that returns no number is found out now."""
    from spmd_rl.rewards.grade import RewardSample
    from spmd_rl.rewards.pool import GraderPool

    pool = GraderPool(config.reward.rules, config.reward.workers, config.reward.timeout_seconds)
    pool.submit(0, RewardSample(prompt.text, prompt.answer, prompt.answer, "stop", prompt.row))
    pool.collect(block=True)
    return pool


def _start_log(config: Config, world_size: int, lines: list[str]) -> RunLog:
    log = RunLog(config, Path(config.run.dir or f"runs/{config.run.name}"), world_size)
    (log.run_dir / "config.yaml").write_text(dump(config))
    for line in lines:
        log.note(line)
    return log


def _benchmark(config: Config) -> str:
    source = config.data.eval_source or config.data.source
    return Path(source).stem


def _refuse(error: ValueError) -> None:
    """Say what the user can change, once a node, and leave."""
    if local_rank_from_environment() == 0:
        print(f"\nspmd_rl cannot start:\n{error}\n", file=sys.stderr, flush=True)
        if os.environ.get("SPMD_RL_TRACEBACK"):
            traceback.print_exc()
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        # torchrun ends with a report on the first rank that failed; it quotes this: the last words are the reason.
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error.with_traceback(None))
    sys.exit(USER_ERROR)


def _exit_on_signals() -> None:
    """Leave at once on Ctrl-C and SIGTERM, also while the main thread waits inside a collective.

    A thread waits for the signals: Python runs ordinary handlers only between bytecodes of the main thread.
    """
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def wait() -> None:
        received = signal.sigwait(signals)
        if rank_from_environment() == 0:
            # Show the cursor again, which a live progress display hides.
            sys.stderr.write(
                ("\x1b[?25h" if sys.stderr.isatty() else "") + f"\nended by {signal.Signals(received).name}\n"
            )
            sys.stderr.flush()
        os._exit(128 + received)

    threading.Thread(target=wait, daemon=True, name="signals").start()
