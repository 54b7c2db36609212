"""From a command line to a story: configuration, checks, ranks; rank 0 tells the story, the others serve."""

import atexit
import gc
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from spmd_rl.algorithms.table import try_algorithms
from spmd_rl.config.check import check, notes
from spmd_rl.config.check_reward_models import read_reward_shape, reward_model_knob
from spmd_rl.config.config import Config
from spmd_rl.config.fault_spec import check_parameters
from spmd_rl.config.loading import dump, load_config, load_dataset_config
from spmd_rl.config.redact import hide_in
from spmd_rl.controller.checkpoint_manager import Preempted
from spmd_rl.data.sources.order import PromptOrder
from spmd_rl.distributed.environment import (
    local_rank_from_environment,
    rank_from_environment,
    restarts_from_environment,
    size_from_environment,
)
from spmd_rl.distributed.status import doing
from spmd_rl.errors import refuse
from spmd_rl.evaluation.benchmark import Benchmark
from spmd_rl.health.preemption import preemption_event
from spmd_rl.models.model_shape import ModelShape, read_model_shape
from spmd_rl.runlog.checkpoint_store import SavedCheckpoint
from spmd_rl.runlog.run_log import RunLog
from spmd_rl.runlog.sinks import require_wandb_key

USER_ERROR = 2
_REFERENCE = "model.reference_path"


@dataclass(frozen=True)
class RunContext:
    """What rank 0 needs to know beside the configuration."""

    run_dir: Path
    order: PromptOrder
    benchmarks: list[Benchmark]
    data_parallel: int
    share_prompts: bool
    resumed: SavedCheckpoint | None = None
    """The checkpoint whose story goes on."""


Tell = Callable[[Config, Any, RunContext, Any], None]


def main(tell: Tell, arguments: list[str] | None = None) -> None:
    """Run one entry point on this rank; the exit status is 2 where the user can fix what is wrong."""
    preemption_event()
    launch(configure, lambda settings: run(*settings, tell), arguments)


def launch(
    configure: Callable[[list[str]], Any],
    live: Callable[[Any], None],
    arguments: list[str] | None = None,
    before_exit: Callable[[signal.Signals], bool] = lambda received: True,
) -> None:
    """What every entry point does: settings, or what is wrong with them; then a rank's life, which signals end.

    `before_exit` hears of a signal, on a thread of its own, and keeps the program alive with False.
    """
    silence_libraries()
    from torch.distributed.elastic.multiprocessing.errors import record

    # Importing and building make millions of objects that stay: looking for garbage among them takes seconds.
    gc.disable()
    with user_errors_exit():
        settings = configure(sys.argv[1:] if arguments is None else arguments)
    _exit_on_signals(before_exit)
    from spmd_rl.distributed.addresses import naming_peers
    from spmd_rl.health.error_file import ErrorFileHandler
    from spmd_rl.health.watchdog import reporting_timeouts

    try:
        record(hiding_secrets(naming_peers(reporting_timeouts(live))), ErrorFileHandler())(settings)
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())
        _leave(1)
    _leave(0)


def _leave(status: int) -> None:
    """End this process as Python does, but for taking itself apart, which takes seconds with torch and vLLM."""
    if status == 0:
        threading._shutdown()  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # whoever reads it may be gone
            stream.flush()
    os._exit(status)


def hiding_secrets(act: Callable[[Any], None]) -> Callable[[Any], None]:
    """Let an error that ends the program, and torchrun's report on it, say no secrets."""

    @wraps(act)
    def acting(settings: Any) -> None:
        try:
            act(settings)
        except Exception as error:
            hide_in(error)
            raise

    return acting


@contextmanager
def user_errors_exit() -> Iterator[None]:
    """Take a ValueError inside for what a user can change; it ends the program."""
    try:
        yield
    except ValueError as error:
        exit_with_usage_error(error)


def silence_libraries() -> None:
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
    refuse(check(config, size_from_environment(), shape))
    if config.run.wandb == "online":
        require_wandb_key()
    return config, shape


def run(config: Config, shape: ModelShape, tell: Tell) -> None:
    """One rank's life."""
    from spmd_rl.platforms import current

    try:
        platform = current(config.run.platform)
        platform.set_environment()
        from spmd_rl.patches import megatron_core, vllm
        from spmd_rl.patches.patch import apply_all
        from spmd_rl.rollout.options import model_options

        applied = apply_all(megatron_core.PATCHES + vllm.PATCHES, platform.patches)
        model_options(config.model.path, shape, config.rollout.block_tokens, platform)
        try_algorithms(config.algorithm)
        _check_weights(config, shape)
        with doing("reads the prompts"):
            loaded = _read_prompts(config)
            readers = _read_reward_models(config, loaded)
        with doing("starts the graders"):
            pool = start_graders(config, loaded.prompts["train"][0])
        from spmd_rl.distributed import world as worlds

        world = worlds.start(platform, config.run.collective_timeout_seconds)
        from spmd_rl.distributed.gather import gather
        from spmd_rl.runtime.resume_point import resume_point

        run_dir = Path(config.run.dir or f"runs/{config.run.name}")
        restarts = max(gather(restarts_from_environment(), world.payload))  # torchrun counts on each node for itself
        faults = _faults(config, run_dir, world.rank, restarts)
        watch = watch_ranks(config, world, run_dir)
        with doing("looks for a checkpoint to go on from"):
            resumed, said = resume_point(config, run_dir, world)
    except ValueError as error:
        exit_with_usage_error(error)
    from spmd_rl.worker.train_worker import TrainWorker

    gc.freeze()
    gc.enable()
    lines = applied + loaded.notes + notes(config, world.size) + said
    lines += [f"reward model {name}: reads {reader.described()}" for name, reader in readers.items()]
    log = _start_log(config, run_dir, world, lines, resumed, restarts) if world.rank == 0 else None
    try:
        worker = TrainWorker(config, shape, platform, world, loaded.prompts, loaded.tokenizer, pool, readers)
        if resumed is not None:
            with doing(f"loads {resumed.saved.path}"):
                worker.saver.load(resumed.saved.path, resumed.only_weights)
        if faults is not None:
            faults.attach(worker)
    except ValueError as error:
        exit_with_usage_error(error)

    def control(commands: Any) -> None:
        from spmd_rl.controller.ranks import Ranks

        ranks = Ranks(commands, worker)
        story = RunContext(
            run_dir=log.run_dir,
            order=loaded.order,
            benchmarks=loaded.benchmarks,
            data_parallel=config.parallel.data(world.size),
            share_prompts=config.train.share_prompts,
            resumed=None if resumed is None or resumed.only_weights else resumed.saved,
        )
        with log:
            try:
                tell(config, ranks, story, log)
            except Preempted as asked:
                log.note(str(asked))
        ranks.stop()

    control_or_serve(worker, world, config.run.control_timeout_seconds, control, watch)


def watch_ranks(config: Config, world: Any, directory: Path | None) -> Any:
    """What finds a hang; None where the configuration wants none. `directory`: where a report goes."""
    from spmd_rl.health.watchdog import Watchdog

    # A grader may take its time; only a deadline that was set is shorter.
    least = 2 * config.reward.timeout_seconds if config.reward.rules else 0.0
    return None if config.hang.action == "off" else Watchdog(config.hang, world, directory, least)


def control_or_serve(
    worker: Any, world: Any, control_timeout_seconds: float, control: Callable[[Any], None], watch: Any = None
) -> None:
    """Rank 0 tells the story, which ends with the verb stop; the others serve; then all leave together."""
    from spmd_rl.distributed.commands import ControlChannel

    # All that exists now lives as long as the run; a full collection would look at it each time, for 0.1 s or more.
    gc.collect()
    gc.freeze()
    # Python waits with full collections until a quarter more objects are there than at the last one: now than none.
    gc.collect()
    gc.enable()
    commands = ControlChannel(world, control_timeout_seconds)
    if world.rank:
        worker.serve(commands)
    else:
        control(commands)
    import torch.distributed as dist

    dist.barrier(group=world.control)
    if watch is not None:
        watch.close()
    worker.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _faults(config: Config, run_dir: Path, rank: int, restarts: int) -> Any:
    """What this rank was asked to suffer, if anything; it may strike from now on."""
    if not config.inject:
        return None
    from spmd_rl.testing.fault_injection import FaultInjector

    return FaultInjector(config, run_dir, rank, restarts)


def _check_weights(config: Config, shape: ModelShape) -> None:
    """Read the headers of all weight files: a missing, truncated or foreign one is found before anything is made."""
    from spmd_rl.weights.files.hf_reader import check_headers, read_headers

    check_parameters(config, read_headers(config.model.path) if config.inject else ())
    check_headers(config.model.path, read_headers(config.model.path), shape)
    if reference := config.model.reference_path:
        check_headers(reference, read_headers(reference, _REFERENCE), shape, _REFERENCE)
    for name, model in config.reward.models.items():
        knob = reward_model_knob(name)
        check_headers(model.path, read_headers(model.path, knob), read_reward_shape(name, model), knob)


@dataclass
class _Loaded:
    tokenizer: Any
    prompts: dict[str, list[Any]]
    notes: list[str]
    order: PromptOrder
    benchmarks: list[Benchmark]


def _read_prompts(config: Config) -> _Loaded:
    """Every rank reads all prompts: only their row numbers travel."""
    from spmd_rl.data.sources.prompts import load_dataset, load_prompts
    from spmd_rl.data.tokens import load_tokenizer

    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    loaded = {split: load_prompts(config, tokenizer, split) for split in ("train", "eval")}
    names: dict[str, str] = {}
    if loaded["eval"].prompts:
        names["eval"] = load_dataset_config(config.data.eval_source or config.data.source).name or "eval"
    for text in config.evaluation.benchmarks:
        dataset = load_dataset_config(text)
        split = names_split(dataset.name or text, names)
        limit = config.evaluation.limit
        loaded[split] = load_dataset(dataset, config.data, tokenizer, config.run.seed, "eval", limit)
    benchmarks = [Benchmark(name, split, len(loaded[split].prompts)) for split, name in names.items()]
    sizes, weights = zip(*loaded["train"].shares, strict=True)
    return _Loaded(
        tokenizer,
        {split: list(part.prompts) for split, part in loaded.items()},
        [note for part in loaded.values() for note in part.notes],
        PromptOrder(sizes, config.run.seed, config.data.shuffle, weights),
        benchmarks,
    )


def _read_reward_models(config: Config, loaded: _Loaded) -> dict[str, Any]:
    """How each reward model reads samples; a tokenizer or template that can't is found out now."""
    from spmd_rl.data.reward_model_reading import make_reader
    from spmd_rl.data.tokens import load_tokenizer

    readers = {}
    for name, model in config.reward.models.items():
        own = load_tokenizer(model.path, config.model.trust_remote_code, reward_model_knob(name))
        vocabulary, prompts = read_reward_shape(name, model).vocabulary, loaded.prompts["train"]
        readers[name] = make_reader(f"reward.models.{name}", model.reads, own, loaded.tokenizer, vocabulary, prompts)
    return readers


def names_split(name: str, names: dict[str, str]) -> str:
    """Give a benchmark a split of its own, and a name that no other of `names` has: a number is added where one has."""
    taken = set(names.values())
    free = next(n for n in (name, *(f"{name}_{i}" for i in range(2, len(names) + 3))) if n not in taken)
    split = f"benchmark {len(names)}"
    names[split] = free.replace("/", "_")
    return split


def start_graders(config: Config, prompt: Any) -> Any:
    """Start the grader processes and try the rules on the first prompt's own answer; one that fails ends the run."""
    from spmd_rl.rewards.grade import RewardSample
    from spmd_rl.rewards.grading.null_pool import NullPool
    from spmd_rl.rewards.grading.pool import GraderPool

    reward = config.reward
    if not reward.rules:  # reward models alone decide
        return NullPool()
    pool = GraderPool(reward.rules, reward.workers, reward.timeout_seconds, reward.memory_mib, reward.batch)
    sample = RewardSample(
        prompt=prompt.text,
        response=prompt.answer,
        answer=prompt.answer,
        row=prompt.row,
        prompt_ids=list(prompt.token_ids),
        response_tokens=1,
        response_limit=config.rollout.max_response_length,
    )
    try:
        pool.try_rules(sample)
    except ValueError:
        pool.close()
        raise
    return pool


def _start_log(config: Config, run_dir: Path, world: Any, lines: list[str], resumed: Any, restarts: int) -> RunLog:
    """What is kept of the run; from now on what is in its directory is this launch's."""
    same_run = resumed is not None and resumed.same_run
    first = resumed.saved.step if resumed is not None and not resumed.only_weights else 0
    log = RunLog(
        config,
        run_dir,
        world.size,
        first if same_run else None,
        resumed.saved.state().get("identity") if same_run else None,
        restarts,
        first if world.begun() else None,
    )
    world.begin()
    (log.run_dir / "config.yaml").write_text(dump(config))
    for line in lines:
        log.note(line)
    if resumed is not None:
        log.note(f"took up {resumed.saved.path}" + (", its weights alone" if resumed.only_weights else ""))
        if same_run and first >= config.train.steps:
            ways = "a larger train.steps goes on, checkpoint.resume = never begins anew"
            log.note(f"all {config.train.steps} steps are done: {ways}")
    return log


def exit_with_usage_error(error: ValueError) -> None:
    """Say what the user can change, once a node, and leave."""
    hide_in(error)
    if local_rank_from_environment() == 0:
        print(f"\nspmd_rl cannot start:\n{error}\n", file=sys.stderr, flush=True)
        if os.environ.get("SPMD_RL_TRACEBACK"):
            traceback.print_exc()
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        # torchrun ends with a report on the first rank that failed; it quotes this: the last words are the reason.
        from spmd_rl.health.error_file import ErrorFileHandler

        ErrorFileHandler().record_exception(error.with_traceback(None))
    sys.exit(USER_ERROR)


def _exit_on_signals(before_exit: Callable[[signal.Signals], bool]) -> None:
    """Leave at once on Ctrl-C and SIGTERM, also while the main thread waits inside a collective.

    A thread waits for the signals: Python runs ordinary handlers only between bytecodes of the main thread.
    """
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def wait() -> None:
        while not before_exit(received := signal.sigwait(signals)):
            pass
        if rank_from_environment() == 0:
            # Show the cursor again, which a live progress display hides.
            sys.stderr.write(
                ("\x1b[?25h" if sys.stderr.isatty() else "") + f"\nended by {signal.Signals(received).name}\n"
            )
            sys.stderr.flush()
        os._exit(128 + received)

    threading.Thread(target=wait, daemon=True, name="signals").start()
