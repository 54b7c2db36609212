"""Every verb, as every rank does it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from spmd_rl.config.config import Config
from spmd_rl.config.names import Phase
from spmd_rl.data.reward_model_reading import Reader
from spmd_rl.data.sources.prompts import Prompt
from spmd_rl.data.tickets import SampleReward
from spmd_rl.distributed.exchange import exchange
from spmd_rl.distributed.layout import TrainLayout
from spmd_rl.distributed.status import doing, set_status
from spmd_rl.distributed.verb import verb
from spmd_rl.distributed.world import World
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.platforms.platform import Platform
from spmd_rl.rewards.grading.pool import GraderPool
from spmd_rl.training.packing import Packed
from spmd_rl.training.parallel import start_parallel
from spmd_rl.training.trainer import Trainer
from spmd_rl.weights.families import megatron_shard
from spmd_rl.weights.files.export import export_hf
from spmd_rl.weights.files.hf_reader import load_shard
from spmd_rl.worker.base_worker import BaseWorker
from spmd_rl.worker.consistency_check import TOLERANCE, ConsistencyCheck
from spmd_rl.worker.device_switch import DeviceSwitch
from spmd_rl.worker.process_usage import ProcessUsageMeter
from spmd_rl.worker.reward_model_scorer import RewardModelScorer
from spmd_rl.worker.sample_store import from_wire, to_wire
from spmd_rl.worker.shard_saver import ShardSaver


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
        self.config, self.shape, self.platform = config, shape, platform
        self.footprints = ProcessUsageMeter()
        self.train_layout = TrainLayout.of(config.parallel, world.size)
        self.data_ranks = [self.train_layout.coords(rank).data for rank in range(world.size)]
        self.place = start_parallel(self.train_layout, config.run.seed)
        device = platform.device(world.local_rank)
        self.shard = megatron_shard(shape, self.train_layout, world.rank)
        self.trainer = Trainer(config, shape, self.train_layout, self.place, device, self._load)
        self.reward_models = {
            name: RewardModelScorer(config, name, reader, self.trainer, world)
            for name, reader in (readers or {}).items()
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
            self.train_layout,
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
        self.saver = ShardSaver(self.trainer, self.shard, world)
        set_status(doing="")
        self.packs: list[list[Packed]] = []
        self.peaks: dict[str, int] = {Phase.START: platform.peak_memory_bytes()}

    def _load(self, parameters: dict[str, torch.Tensor], path: str) -> None:
        load_shard(path, self.shard, parameters, self.shape)

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
        """Send samples of this rank to their data-parallel ranks; pack [mini-batch][micro-batch][group] of samples."""
        outgoing = [
            to_wire(self.store.made[sample] for sample, data in data_ranks.items() if data == self.data_ranks[rank])
            for rank in range(self.world.size)
        ]
        with doing("exchanges samples"):
            incoming, sent = exchange(outgoing, self.world.payload)
        self.store.training = {sample.id: sample for wire in incoming for sample in from_wire(wire)}
        held = self.store.training
        self.packs = [
            self.trainer.pack(
                [[[held[i] for i in group] for group in batch] for batch in minibatch],
                share_prompts,
            )
            for minibatch in minibatches
        ]
        packs = [pack for packs in self.packs for pack in packs]
        return {
            "network_bytes": sent,
            "tokens": sum(pack.tokens.shape[1] for pack in packs),
            "padding_tokens": sum(pack.padding_tokens for pack in packs),
        }

    @verb
    def score(self, model: str) -> dict[str, float]:
        started = time.perf_counter()
        if model == "reference":
            self.trainer.reference_on_device.onload()
        onloaded = time.perf_counter()
        self.trainer.score([pack for packs in self.packs for pack in packs], model)
        scored = time.perf_counter()
        if model == "reference":
            self.trainer.reference_on_device.offload()
        return {"onload": onloaded - started, "offload": time.perf_counter() - scored}

    @verb
    def read(self, model: str) -> list[tuple[int, int, int]]:
        return self.reward_models[model].read(self.store)

    @verb
    def judge(
        self, model: str, data_ranks: dict[int, int], minibatches: list[list[list[list[int]]]], share_prompts: bool
    ) -> dict[str, Any]:
        return self.reward_models[model].judge(self.store, data_ranks, minibatches[0], share_prompts)

    @verb
    def learn(
        self, minibatch: int, ids: list[int], advantages: list[float], weights: list[float], learning_rate: float
    ) -> dict[str, Any]:
        learned = self.trainer.learn(
            self.packs[minibatch],
            dict(zip(ids, advantages, strict=True)),
            dict(zip(ids, weights, strict=True)),
            learning_rate,
        )
        return asdict(learned)

    @verb
    def write_conversations(self, directory: str, step: int) -> None:
        self.rollouts.write_conversations(directory, step)

    @verb
    def forget(self) -> None:
        super().forget()
        self.packs = []

    @verb
    def export_hf(self, directory: str) -> None:
        export_hf(
            directory,
            self.config.model.path,
            self.shape,
            [megatron_shard(self.shape, self.train_layout, rank) for rank in range(self.world.size)],
            self.trainer.parameters(),
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
            sample = one["id"]
            if sample in self.store.made:
                held = self.store.scored.get(sample)
                self.store.scored[sample] = SampleReward(**one | {"extracted": held.extracted if held else None})

    @verb
    def costs(self) -> dict[str, dict[str, int]]:
        peaks, self.peaks = self.peaks, {}
        return {"peaks": peaks, "holds": asdict(self.footprints.now())}
