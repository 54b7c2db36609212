"""One reward model on one rank: what it reads of the rank's samples, and what it says of those it is given."""

import time
from collections import defaultdict
from os.path import commonprefix
from typing import Any

import torch

from spmd_rl.config.check_reward_models import read_reward_shape
from spmd_rl.config.config import Config
from spmd_rl.data.reward_model_reading import Reader
from spmd_rl.distributed.exchange import exchange
from spmd_rl.distributed.status import doing
from spmd_rl.distributed.world import World
from spmd_rl.training.reward_model import RewardModel, scored_sample
from spmd_rl.training.trainer import Trainer
from spmd_rl.weights.families import megatron_shard
from spmd_rl.weights.files.hf_reader import load_shard
from spmd_rl.worker.sample_store import SampleStore, read_from_wire, read_to_wire


class RewardModelScorer:
    """Reads on the ranks that made the samples, scores on the ranks of the training layout."""

    def __init__(self, config: Config, name: str, reader: Reader, trainer: Trainer, world: World):
        self.reader, self.trainer, self.world = reader, trainer, world
        model = config.reward.models[name]
        shape = read_reward_shape(name, model)
        layout = trainer.layout.suited_to(shape.layers)
        shard = megatron_shard(shape, layout, world.rank)
        self.model = RewardModel(
            model.path,
            shape,
            layout,
            trainer.place,
            trainer.device,
            model.dtype or config.model.dtype,
            config.parallel.sequence,
            model.label or 0,
            lambda parameters, path: load_shard(path, shard, parameters, shape),
        )

    def read(self, store: SampleStore) -> list[tuple[int, int, int]]:
        """Keep this rank's samples as the model reads them; id, tokens shared with the prompt's other samples, others.

        In other words than the policy's, a prompt and its responses may meet inside a token: what samples of a prompt
        share is what their tokens do.
        """
        ids = sorted(store.made)
        read = self.reader.read_all(
            [store.prompts[i] for i in ids],
            [store.made[i].response.tolist() for i in ids],
            [store.texts[i] for i in ids],
        )
        groups: dict[int, list[int]] = defaultdict(list)
        for number, sample in enumerate(ids):
            groups[id(store.prompts[sample])].append(number)
        store.read = {}
        for members in groups.values():
            shared = max(1, len(commonprefix([read[number] for number in members])))
            store.read |= {ids[number]: (shared, torch.tensor(read[number])) for number in members}
        return [(sample, shared, len(tokens) - shared) for sample, (shared, tokens) in store.read.items()]

    def judge(
        self, store: SampleStore, data_ranks: dict[int, int], microbatches: list[list[list[int]]], share_prompts: bool
    ) -> dict[str, Any]:
        """Return the scores of the samples that this rank reports.

        `data_ranks`: where the samples go that it read. `microbatches`: [micro-batch][group] of samples that it packs.
        """
        layout = self.trainer.layout
        outgoing = [
            read_to_wire(
                (sample, *store.read[sample]) for sample, data in data_ranks.items() if data == layout.coords(rank).data
            )
            for rank in range(self.world.size)
        ]
        with doing("exchanges samples"):
            incoming, sent = exchange(outgoing, self.world.payload)
        held = {
            sample: scored_sample(sample, tokens, shared)
            for wire in incoming
            for sample, shared, tokens in read_from_wire(wire)
        }
        packs = self.trainer.pack(
            [[[held[i] for i in group] for group in batch] for batch in microbatches], share_prompts
        )
        started = time.perf_counter()
        self.model.on_device.onload()
        onloaded = time.perf_counter()
        scores = self.model.score(packs)
        scored = time.perf_counter()
        self.model.on_device.offload()
        return {
            "scores": list(scores.items()),
            "network_bytes": sent,
            "onload": onloaded - started,
            "offload": time.perf_counter() - scored,
        }
