"""One rank of a program that trains: its components, each with its verbs."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from spmd_rl.config.config import Config
from spmd_rl.config.names import MEMORY_PHASES, RESTING, Phase
from spmd_rl.data.answers import Costs
from spmd_rl.data.image_reader import ImageReader
from spmd_rl.data.reward_model_reading import Reader
from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.distributed.layout import RolloutLayout, TrainLayout
from spmd_rl.distributed.status import set_status
from spmd_rl.distributed.verb import verb
from spmd_rl.distributed.world import World
from spmd_rl.errors import refuse
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.platforms.platform import Platform
from spmd_rl.rewards.grading.pool import GraderPool
from spmd_rl.runlog.checkpoint_store import CheckpointStore
from spmd_rl.runlog.run_dir import CHECKPOINTS, run_directory
from spmd_rl.training.learner import take_turns
from spmd_rl.weights.device_memory import memory_problems, rank_bytes
from spmd_rl.worker.base_worker import BaseWorker
from spmd_rl.worker.consistency_check import TOLERANCE, ConsistencyCheck
from spmd_rl.worker.device_switch import DeviceSwitch
from spmd_rl.worker.gae_estimator import GaeEstimator
from spmd_rl.worker.process_usage import ProcessUsageMeter
from spmd_rl.worker.profiler import Profiler
from spmd_rl.worker.reward_model_scorer import RewardModelScorer
from spmd_rl.worker.rollouts import Made
from spmd_rl.worker.shard_saver import ShardSaver
from spmd_rl.worker.trainer import Trainer


class TrainWorker(BaseWorker):
    """One rank: its shard of the policy, its engine, its graders and its samples."""

    def __init__(
        self,
        config: Config,
        shape: ModelShape,
        platform: Platform,
        world: World,
        prompts: dict[str, list[Prompt]],
        tokenizer: Any,
        pool: GraderPool,
        readers: Mapping[str, Reader] | None = None,
        images: ImageReader | None = None,
    ):
        self.config, self.platform, self.world = config, platform, world
        self.footprints = ProcessUsageMeter()
        directory = run_directory(config)
        self.profiler = Profiler(config.run.profile, directory, world.rank, platform)
        self._refuse_what_does_not_fit(shape)
        self._counted: dict[str, float] = {}
        made: dict[int, Made] = {}
        device = platform.device(world.local_rank)
        self.trainer = Trainer(config, shape, device, world, lambda sample: made[sample].completion.sample)
        self.models, self.learners = self.trainer.models, self.trainer.learners
        self.data_ranks = self.trainer.data_ranks
        scorer = RewardModelScorer(config, readers or {}, self.trainer, made)
        # vLLM measures what is free, and takes of that: nothing of the learners stays on the device meanwhile.
        for learner in self.learners.values():
            learner.offload()
        platform.give_back_memory()
        longest = config.data.max_prompt_length + config.longest_response
        super().__init__(config, shape, platform, world, longest, prompts, tokenizer, pool, made, images)
        if shape.vision is not None:
            self.trainer.pixels = self.images.pixels
        self.engine.sleep()
        take_turns(self.learners, "policy")
        set_status(doing="plans the refresh")
        bucket = config.rollout.refresh_bucket_mib
        self.device_switch = DeviceSwitch(
            self.trainer,
            self.engine,
            world,
            self.rollout_layout,
            int(bucket * 2**20) if bucket else platform.bucket_bytes,
            platform,
            ConsistencyCheck(
                self.trainer,
                self.engine,
                world,
                self.replica,
                prompts["train"][0].token_ids,
                self.images.of("train", 0),
                config.rollout.canary_tolerance or TOLERANCE[config.model.dtype],
            ),
        )
        own = None if config.checkpoint.shared else CheckpointStore(directory / CHECKPOINTS, config.checkpoint)
        self.saver = ShardSaver(self.learners, world, own)
        self.own(self.trainer, scorer, GaeEstimator(self.trainer), self.device_switch, self.saver)
        set_status(doing="")
        platform.give_back_memory()
        self.peaks: dict[str, int] = {Phase.START: platform.peak_memory_bytes(), RESTING: platform.memory_bytes()}

    def _refuse_what_does_not_fit(self, shape: ModelShape) -> None:
        """Raise ConfigError where the models alone are larger than this rank's device."""
        if self.platform.free_and_total_bytes is None:
            return
        config, world = self.config, self.world
        train, rollout = TrainLayout.of(config.parallel, world.size), RolloutLayout.of(config.rollout, world.size)
        held = rank_bytes(config, shape, train, rollout, world.rank)
        refuse(memory_problems(config, {world.rank: held}, self.platform.free_and_total_bytes()[1]))

    def do(self, name: str, arguments: dict[str, Any]) -> Any:
        """Do one verb, and remember the memory it took at its peak."""
        self.platform.reset_peak_memory()
        with self.profiler.verb(name):
            answer = super().do(name, arguments)
        of_model = f"{name} {arguments.get('model')}"
        of = of_model if of_model in MEMORY_PHASES else name
        self.peaks[of] = max(self.peaks.get(of, 0), self.platform.peak_memory_bytes())
        return answer

    @verb
    def costs(self) -> Costs:
        """Return the memory that each verb took at its peak since the last time, and what this rank holds now."""
        peaks, self.peaks = self.peaks, {}
        images = self._images()
        seconds = images.pop("seconds", 0.0)
        return Costs(
            peaks, [asdict(self.footprints.now())], {name: int(count) for name, count in images.items()}, seconds
        )

    def _images(self) -> dict[str, float]:
        """Return how often images were decoded and encoded since the last time, and the seconds of a frozen tower."""
        if self.shape.vision is None:
            return {}
        towers = [
            chunk.features for model in self.models.values() for chunk in model.module if hasattr(chunk, "features")
        ]
        assert self.engine.features is not None
        now = {
            "decoded": self.images.decoded,
            "encoded": sum(features.computed for features in towers),
            "encoded_rollout": self.engine.features.computed,
            "seconds": sum(features.seconds for features in towers),
        }
        before, self._counted = self._counted, now
        return {name: count - before.get(name, 0) for name, count in now.items()}
