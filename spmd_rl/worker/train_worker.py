"""Every verb, as every rank does it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spmd_rl.config.config import Config
from spmd_rl.config.names import Phase
from spmd_rl.data.reward_model_reading import Reader
from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.data.tickets import SampleReward
from spmd_rl.distributed.status import set_status
from spmd_rl.distributed.verb import verb
from spmd_rl.distributed.world import World
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.platforms.platform import Platform
from spmd_rl.rewards.grading.pool import GraderPool
from spmd_rl.weights.files.export import export_hf
from spmd_rl.worker.base_worker import BaseWorker
from spmd_rl.worker.consistency_check import TOLERANCE, ConsistencyCheck
from spmd_rl.worker.device_switch import DeviceSwitch
from spmd_rl.worker.process_usage import ProcessUsageMeter
from spmd_rl.worker.reward_model_scorer import RewardModelScorer
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
    ):
        self.config, self.platform = config, platform
        self.footprints = ProcessUsageMeter()
        self.trainer = Trainer(config, shape, platform.device(world.local_rank), world)
        self.models, self.learners = self.trainer.models, self.trainer.learners
        self.data_ranks = self.trainer.data_ranks
        self.reward_models = {
            name: RewardModelScorer(config, name, reader, self.trainer) for name, reader in (readers or {}).items()
        }
        # The trainer was there first: what vLLM finds free is left to it.
        longest = config.data.max_prompt_length + config.longest_response
        super().__init__(config, shape, platform, world, longest, prompts, tokenizer, pool)
        self.engine.sleep()
        set_status(doing="plans the refresh")
        bucket = config.rollout.refresh_bucket_mib
        self.device_switch = DeviceSwitch(
            self.trainer,
            self.engine,
            world,
            self.rollout_layout,
            int(bucket * 2**20) if bucket else platform.bucket_bytes,
            platform.give_back_memory,
        )
        self.consistency = ConsistencyCheck(
            self.trainer,
            self.engine,
            world,
            self.replica,
            prompts["train"][0].token_ids,
            config.rollout.canary_tolerance or TOLERANCE[config.model.dtype],
        )
        self.saver = ShardSaver(self.learners, world)
        set_status(doing="")
        self.peaks: dict[str, int] = {Phase.START: platform.peak_memory_bytes()}

    def do(self, name: str, arguments: dict[str, Any]) -> Any:
        """Do one verb, and remember the memory it took at its peak."""
        self.platform.reset_peak_memory()
        answer = super().do(name, arguments)
        self.peaks[name] = max(self.peaks.get(name, 0), self.platform.peak_memory_bytes())
        return answer

    @verb
    def to_rollout(self, canary: bool) -> dict[str, int]:
        traffic = self.device_switch.to_rollout()
        if canary:
            self.consistency.generate(self.config.rollout.max_response_length)
        return {"network_bytes": traffic.network_bytes, "local_bytes": traffic.local_bytes}

    @verb
    def to_training(self) -> float | None:
        self.device_switch.to_training()
        return self.consistency.compare()

    @verb
    def exchange(
        self, data_ranks: dict[int, int], minibatches: list[list[list[list[int]]]], share_prompts: bool
    ) -> dict[str, int]:
        made = {sample: self.rollouts.made[sample].completion.sample for sample in data_ranks}
        return self.trainer.exchange(made, data_ranks, minibatches, share_prompts)

    @verb
    def put(self, field: str, values: dict[int, float]) -> None:
        self.trainer.put(field, values)

    @verb
    def score(self, model: str) -> dict[str, float]:
        return self.trainer.score(model)

    @verb
    def read(self, model: str) -> list[tuple[int, int, int]]:
        return self.reward_models[model].read(self.rollouts.made)

    @verb
    def judge(
        self, model: str, data_ranks: dict[int, int], minibatches: list[list[list[list[int]]]], share_prompts: bool
    ) -> dict[str, Any]:
        return self.reward_models[model].judge(data_ranks, minibatches[0], share_prompts)

    @verb
    def learn(self, model: str, minibatch: int, learning_rate: float) -> dict[str, Any]:
        return self.trainer.learn(model, minibatch, learning_rate)

    @verb
    def write_conversations(self, directory: str, step: int) -> None:
        self.rollouts.write_conversations(directory, step)

    @verb
    def forget(self) -> None:
        super().forget()
        self.trainer.forget()

    @verb
    def export_hf(self, directory: str) -> None:
        policy = self.models["policy"]
        export_hf(
            directory,
            self.config.model.path,
            policy.shape,
            self.device_switch.sources,
            policy.merged_weights(),
            self.world.rank,
            control=self.world.payload,
        )

    @verb
    def checkpoint_bytes(self) -> int:
        return self.saver.bytes()

    @verb
    def begin_checkpoint(self, directory: str) -> None:
        self.saver.begin(Path(directory))

    @verb
    def checkpoint_progress(self, wait: bool) -> dict[str, Any]:
        return self.saver.progress(wait)

    @verb
    def checkpoint_digests(self, directory: str, names: Sequence[str], wait: bool) -> dict[str, str] | None:
        return self.saver.digests(Path(directory), names[self.world.rank :: self.world.size], wait)

    @verb
    def keep_rewards(self, scored: list[dict[str, Any]]) -> None:
        for one in scored:
            if made := self.rollouts.made.get(one["id"]):
                extracted = made.reward.extracted if made.reward else None
                made.reward = SampleReward(**one | {"extracted": extracted})

    @verb
    def costs(self) -> dict[str, dict[str, int]]:
        peaks, self.peaks = self.peaks, {}
        return {"peaks": peaks, "holds": asdict(self.footprints.now())}
