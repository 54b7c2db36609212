"""Assemble a program on every rank: inputs, the other ranks, a worker; rank 0 controls, the others serve.

`main` is where a training loop of one's own starts: `sys.exit(main(my_loop))` in a file that torchrun runs with `-m`.
The loop is given the configuration and a session, as spmd_rl/grpo.py's is.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from spmd_rl.algorithms.table import try_algorithms
from spmd_rl.config.check import notes
from spmd_rl.config.config import Config
from spmd_rl.config.loading import dump, settings
from spmd_rl.config.redact import hidden
from spmd_rl.config.resume_policy import changes
from spmd_rl.controller.checkpoint_manager import Preempted
from spmd_rl.controller.ranks import Ranks
from spmd_rl.controller.session import RunContext, Session
from spmd_rl.data.answers import ANSWERS
from spmd_rl.distributed.environment import rank_from_environment
from spmd_rl.distributed.status import doing
from spmd_rl.errors import refuse
from spmd_rl.health.preemption import preemption_event
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.models.quantized import export_notes
from spmd_rl.patches.unused_imports import left_out, unused
from spmd_rl.platforms import current
from spmd_rl.platforms.platform import Platform
from spmd_rl.runlog.console import console, described
from spmd_rl.runlog.run_dir import run_directory, way_on
from spmd_rl.runlog.run_lock import RunLock
from spmd_rl.runlog.run_log import RunLog
from spmd_rl.runlog.start_up import StartUp
from spmd_rl.runtime.cache_home import use_writable_cache
from spmd_rl.runtime.process import Started, ends_with, run, user_errors_exit, wait_for_signal
from spmd_rl.runtime.sources import changed_sources, sources
from spmd_rl.runtime.startup import (
    Inputs,
    check_weights,
    configure,
    describe_ends,
    read_inputs,
    refuse_unknown_tokens,
    start_graders,
)

if TYPE_CHECKING:  # torch stays out until the settings are right
    from spmd_rl.distributed.commands import ControlChannel
    from spmd_rl.distributed.world import World
    from spmd_rl.rewards.grading.null_pool import NullPool
    from spmd_rl.rewards.grading.pool import GraderPool
    from spmd_rl.worker.base_worker import BaseWorker

Loop = Callable[[Config, Session], None]


@dataclass(frozen=True)
class Rank:
    """Hold what a worker is built from, once the ranks have met."""

    platform: Platform
    world: "World"
    inputs: Inputs
    graders: "GraderPool | NullPool | None"
    notes: list[str]


class Program(Protocol):
    """Stand for a program: what differs between those that train and those that only generate."""

    config: Config
    shape: ModelShape
    platform: str
    """As run.platform."""
    directory: Path | None
    """The directory that it writes to."""
    trains: bool
    begun: bool
    """True where this rank serves: the program's directory is its own."""

    def read(self) -> Inputs:
        """Read what every rank reads. Raises ValueError for what a user can change, as `build` does."""

    def build(self, rank: Rank) -> "BaseWorker":
        """Build this rank's worker, once the ranks have met."""

    def control(self, channel: "ControlChannel") -> None:
        """Control the ranks, on rank 0, up to the verb stop."""


def main(loop: Loop, arguments: list[str] | None = None, critic: bool | None = None) -> int:
    """Train with a loop; return the exit status, which is 2 where the user can fix what is wrong.

    A rank, and a file that is run and calls this at its top level, end with that status whether or not they pass it on.
    `critic`: whether the loop is for a critic's advantages (algorithm.advantage = gae); None: for any.
    """
    preemption_event()
    trainings: list[Training] = []

    def prepare(words: list[str]) -> Training:
        trainings.append(Training(*configure(words, critic), loop))
        return trainings[0]

    def live(training: Training, started: Started) -> str:
        run_rank(training, started)
        return training.missing

    def last_words() -> str:
        return trainings[0].last_words() if trainings else ""

    def failed(error: BaseException) -> None:
        for training in trainings:
            training.failed(error)

    status = run(prepare, live, arguments, last_words=last_words, failed=failed)
    return ends_with(status, sys._getframe(1))


def run_rank(program: Program, started: Started) -> None:
    """Live one rank's life: read, meet the others, build, control or serve, and leave together."""
    config = program.config
    with user_errors_exit():
        platform, applied = _prepare(program)
        inputs = program.read()
        refuse_unknown_tokens(inputs, program.shape.vocabulary, config.model.knob)
        inputs = replace(inputs, notes=[*inputs.notes, describe_ends(config, inputs)])
        first = next(iter(inputs.prompts.values()), ())[:1]
        graders = start_graders(config, first[0], inputs.tokenizer) if first else None
        with doing("imports torch"):
            import torch.distributed as dist

            from spmd_rl.distributed import world as worlds
            from spmd_rl.distributed.commands import ControlChannel
            from spmd_rl.health.watchdog import Watchdog

        with doing("meets the other ranks"):
            world = worlds.start(platform, config.run.collective_timeout_seconds)
        # A grader may take its time; only a deadline that was set is shorter.
        longest = max(config.reward.timeout_seconds, config.reward.first_call_seconds)
        least = 2 * longest if config.reward.rules else 0.0
        watch = None if config.hang.action == "off" else Watchdog(config.hang, world, program.directory, least)
        slower = platform.slower_paths(program.shape, config.model.dtype) if program.trains else []
        worker = program.build(Rank(platform, world, inputs, graders, [*applied, *slower]))
    started()
    channel = ControlChannel(world, config.run.control_timeout_seconds, protocol=ANSWERS)
    if world.rank:
        program.begun = True
        worker.serve(channel)
    else:
        program.control(channel)
    dist.barrier(group=world.control)
    if watch is not None:
        watch.close()
    worker.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _prepare(program: Program) -> tuple[Platform, list[str]]:
    """Make this machine ready for torch, Megatron and vLLM; returns its record and what was patched."""
    platform, config = current(program.platform), program.config
    cache = use_writable_cache()
    rollout = config.rollout
    platform.set_environment(config.run.deterministic)
    sharing = rollout.tensor * rollout.data
    variables = platform.set_model_environment(program.shape, rollout.tensor, sharing, rollout.max_sequences)
    # Refuses a model that vLLM has no kernels for here.
    platform.engine_model_options(config.model.path, program.shape, rollout.block_tokens, config.model.knob)
    if config.run.deterministic:
        platform.make_deterministic()
    from spmd_rl.patches import megatron_core, torch_gloo, vllm
    from spmd_rl.patches.patch import apply_all

    patches = (*torch_gloo.PATCHES, *(megatron_core.PATCHES if program.trains else ()), *vllm.PATCHES)
    applied = apply_all(patches, platform.patches)
    return platform, [*applied, *variables, *cache]


class Training:
    """Train with a loop."""

    trains = True
    begun = False
    missing = ""
    """Says what the run was asked and did not do."""

    def __init__(self, config: Config, shape: ModelShape, loop: Loop):
        self.config, self.shape, self.loop, self.platform = config, shape, loop, config.run.platform
        self.directory = run_directory(config)
        self.lock: RunLock | None = None
        self.start_up = None if rank_from_environment() else StartUp(console(config.train.steps))

    def read(self) -> Inputs:
        """Read the weights' headers, try the algorithms, then read the prompts."""
        check_weights(self.config, self.shape)
        try_algorithms(self.config.algorithm)
        return read_inputs(self.config)

    def build(self, rank: Rank) -> "BaseWorker":
        """Find where the run goes on, begin its log, and build the worker."""
        with doing("imports Megatron-Core and vLLM"), left_out(unused()):
            from spmd_rl.rollout.engine import import_vllm
            from spmd_rl.runtime.node_parts import NodeParts
            from spmd_rl.runtime.resume_point import resume_point
            from spmd_rl.runtime.run_directory import hold, keep_finished
            from spmd_rl.worker.train_worker import TrainWorker

            import_vllm()
        config, world, inputs = self.config, rank.world, rank.inputs
        with doing("waits for its directory"):
            self.lock = hold(self.directory, world)
        restarts = world.restarts()
        faults = None
        if config.inject:
            from spmd_rl.testing.fault_injection import FaultInjector

            faults = FaultInjector(config, self.directory, world.rank, restarts)  # they may strike from now on
        parts, others = None if config.checkpoint.shared else NodeParts(config, self.directory, world), list[str]()
        with doing("looks for a checkpoint to go on from"):
            if parts is not None and (config.checkpoint.resume != "never" or world.begun()):
                others = parts.bring(config.checkpoint.resume)
            resumed, found = resume_point(config, self.directory, world)
        found = [*others, *found]
        if parts is not None:
            parts.begin_after(resumed.saved.step if resumed is not None and resumed.same_run else 0)
        if resumed is None or not resumed.same_run:
            keep_finished(config, self.directory, world)
        self.sources = sources(inputs.prompts["train"], config.reward.rules)
        if resumed is not None and not resumed.only_weights:
            state = resumed.saved.state()
            differ = [name for name, _, _ in changes(state.get("settings", {}), settings(config))]
            allowed = config.checkpoint.resume_allow
            changed, problems = changed_sources(state.get("sources") or {}, self.sources, differ, allowed)
            refuse(problems)
            found = [*found, *changed]
        lines = [*inputs.notes, *notes(config, world.size), *export_notes(Path(config.model.path)), *found]
        lines += [f"reward model {name}: reads {reader.described()}" for name, reader in inputs.readers.items()]
        self.rank, self.resumed = rank, resumed
        if world.rank == 0:
            self.log = self._start_log(lines, restarts)
        self.worker = TrainWorker(
            config,
            self.shape,
            rank.platform,
            world,
            inputs.prompts,
            inputs.tokenizer,
            rank.graders,
            inputs.readers,
            inputs.images,
        )
        if world.rank == 0:
            self.log.note(self.worker.cache_described)
        if resumed is not None:
            with doing(f"loads {resumed.saved.path}"):
                anew = self.worker.saver.load(resumed.saved.path, resumed.only_weights)
            if parts is not None:
                parts.drop()
            if anew and world.rank == 0:
                self.log.note(f"{resumed.saved.path} has no {' and no '.join(anew)}, which begins anew")
        if faults is not None:
            faults.attach(self.worker)
        return self.worker

    def _start_log(self, lines: list[str], restarts: int) -> RunLog:
        """Begin what is kept of the run; from now on what is in its directory is this launch's."""
        config, world, resumed = self.config, self.rank.world, self.resumed
        same_run = resumed is not None and resumed.same_run
        first = resumed.saved.step if resumed is not None and not resumed.only_weights else 0
        log = RunLog(
            config,
            self.directory,
            world.size,
            first if same_run else None,
            resumed.saved.state().get("identity") if resumed is not None and same_run else None,
            restarts,
            first if world.begun() else None,
            self.start_up,
        )
        world.begin()
        (log.run_dir / "config.yaml").write_text(dump(config), encoding="utf-8")
        for line in self.rank.notes:
            log.keep(line)
        patches = sum(line.startswith("patch ") for line in self.rank.notes)
        log.note(f"{patches} patches of libraries are applied: run.log says which and why, and the versions")
        for line in lines:
            log.note(line)
        if resumed is not None:
            log.note(f"loaded {resumed.saved.path}" + (", its weights alone" if resumed.only_weights else ""))
            if same_run and first >= config.train.steps:
                ways = "a larger train.steps goes on, checkpoint.resume = never begins anew"
                log.note(f"all {config.train.steps} steps are done: {ways}")
        return log

    def last_words(self) -> str:
        """Return what to say of the run where a signal ends it, leave it in run.log, and give the directory back."""
        if self.lock is None:  # nothing is begun
            return ""
        way = ""
        with suppress(OSError):
            way = f"; {way_on(self.directory, self.config.checkpoint.resume)}"
            self._note(f"ended by a signal{way}")
            self.lock.release()
        return way

    def failed(self, error: BaseException) -> None:
        """Leave the error of a rank other than 0, whose own are noted by its log, in run.log."""
        if self.begun:
            self._note(f"rank {self.rank.world.rank} failed: {described(error)}")

    def _note(self, text: str) -> None:
        with (self.directory / "run.log").open("a", encoding="utf-8") as log:
            log.write(hidden(text) + "\n")

    def control(self, channel: "ControlChannel") -> None:
        """Run the loop, to its end or until a rank is asked to end."""
        config, inputs, log, resumed = self.config, self.rank.inputs, self.log, self.resumed
        assert inputs.order is not None
        context = RunContext(
            run_dir=log.run_dir,
            order=inputs.order,
            benchmarks=inputs.benchmarks,
            data_parallel=config.parallel.data(self.rank.world.size),
            share_prompts=config.train.share_prompts,
            resumed=None if resumed is None or resumed.only_weights else resumed.saved,
            sources=self.sources,
        )
        ranks = Ranks(channel, self.worker)
        with log:
            session = Session(config, ranks, log, context)
            try:
                self.loop(config, session)
            except Preempted as asked:
                log.note(str(asked))
            except BaseException:
                wait_for_signal()
                session.checkpoints.complete_while_failing()
                raise
        if log.failed_saves:
            steps = ", ".join(map(str, log.failed_saves))
            self.missing = f"the run is at its end, and what it should have saved after steps {steps} is not saved"
        if self.lock is not None:
            self.lock.release()
        ranks.stop()
