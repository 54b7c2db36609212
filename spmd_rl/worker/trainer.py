"""One rank's share of the verbs that score and train."""

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from spmd_rl.algorithms.kl import sample_kl
from spmd_rl.algorithms.table import find_correction, find_loss, find_value_loss
from spmd_rl.config.check_critic import read_critic
from spmd_rl.config.config import Config
from spmd_rl.data.answers import Exchanged, Learned
from spmd_rl.distributed.exchange import exchange
from spmd_rl.distributed.layout import TrainLayout
from spmd_rl.distributed.sample import Sample
from spmd_rl.distributed.verb import verb
from spmd_rl.distributed.world import World
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.training.critic import ValueLoss
from spmd_rl.training.learner import Learner, Limits, Loss, take_turns
from spmd_rl.training.model import replay_experts
from spmd_rl.training.optimizer import OptimizerSettings
from spmd_rl.training.packing import Packed, pack
from spmd_rl.training.parallel import start_parallel
from spmd_rl.training.policy import PolicyLoss
from spmd_rl.training.sharded_model import ShardedModel
from spmd_rl.training.vision import Pixels, pixels_of
from spmd_rl.weights.families import megatron_shard
from spmd_rl.weights.files import export

Routes = Mapping[int, int]
"""Sample that this rank holds -> the data-parallel rank that trains on it."""
MicroBatches = Sequence[Sequence[Sequence[int]]]
"""[micro-batch][group] -> samples."""


class Trainer:
    """Holds the models by name, and the samples that they are trained on."""

    def __init__(
        self,
        config: Config,
        shape: ModelShape,
        device: torch.device,
        world: World,
        made: Callable[[int], Sample] = {}.__getitem__,
    ):
        """`made`: id -> a sample that this rank made."""
        self.config, self.device, self.world, self.made = config, device, world, made
        self.layout = TrainLayout.of(config.parallel, world.size)
        self.place = start_parallel(self.layout, config.run.seed)
        self.data_ranks = [self.layout.coords(rank).data for rank in range(world.size)]
        """Of each rank."""
        self.models: dict[str, ShardedModel] = {}
        """`policy`, `reference`, ..."""
        self.learners: dict[str, Learner] = {}
        """Those of the models that are trained."""
        self.losses: dict[str, Loss] = {}
        self.samples: dict[int, Sample] = {}
        self.packs: list[list[Packed]] = []
        """Of each mini-batch."""
        self.groups: list[MicroBatches] = []
        """Of each micro-batch of each mini-batch: samples by group."""
        self.share_prompts = False
        self.pixels: Pixels = pixels_of
        """Has the patches of a sample's images."""
        model, algorithm = config.model, config.algorithm
        against_rollout = algorithm.old_logprobs == "rollout"
        loss = PolicyLoss(find_loss(algorithm), find_correction(algorithm), against_rollout)
        self.add("policy", self.built(model.path, shape), loss)
        if config.rollout.router_replay:
            replay_experts(self.models["policy"].module)
        if algorithm.uses_reference:
            self.add("reference", self.built(model.reference_path or model.path, shape))
        if algorithm.uses_critic:
            critic = read_critic(config)
            stored = critic.stored if critic.new_head else None
            built = self.built(critic.path, critic.shape, label=critic.label, stored=stored)
            self.add("critic", built, ValueLoss(find_value_loss(algorithm)), config.critic)

    def built(
        self, path: str, shape: ModelShape, dtype: str = "", label: int = 0, stored: ModelShape | None = None
    ) -> ShardedModel:
        """Build a model of a Hugging Face directory in the run's layout; `add` loads it."""
        layout = self.layout.suited_to(shape.layers)
        return ShardedModel(self.config, path, shape, layout, self.place, self.device, dtype, label, stored)

    def add(
        self, name: str, model: ShardedModel, loss: Loss | None = None, settings: OptimizerSettings | None = None
    ) -> None:
        """Load and hold a model: in training where there is a loss, else frozen, and on the host between uses.

        `settings`: of its optimizer; None: the policy's.
        """
        self.models[name] = model
        if loss is None:
            model.load()
            model.module.requires_grad_(False)
            model.offload()
        else:
            self.learners[name], self.losses[name] = Learner(model, settings or self.config.train), loss

    def bring(
        self, held: Mapping[int, Sample], routes: Routes, minibatches: Sequence[MicroBatches], share_prompts: bool
    ) -> tuple[list[list[Packed]], dict[int, Sample], int]:
        """Bring samples from the ranks that hold them to those that train on them, and lay out this rank's.

        `minibatches`: this rank's part of the plan. Returns its packed micro-batches, its samples by id, and the bytes
        sent to others.
        """
        got, sent = exchange(held, routes, self.data_ranks, self.world.payload)
        packs = [
            self.pack([[[got[i] for i in group] for group in batch] for batch in batches], share_prompts)
            for batches in minibatches
        ]
        return packs, got, sent

    def pack(self, microbatches: Sequence[Sequence[Sequence[Sample]]], share_prompts: bool) -> list[Packed]:
        """Lay out micro-batches for this rank's layout."""
        multiple = self.place.tensor_size if self.config.parallel.sequence else 1
        # The schedule of a virtual pipeline takes micro-batches in rounds of as many as there are stages.
        rest = -len(microbatches) % self.layout.pipeline if self.layout.virtual > 1 else 0
        laid = [*microbatches, *([] for _ in range(rest))]
        chunk, chunks = self.place.context_rank, self.place.context_size
        pixels = self.pixels if self.place.pipeline_rank == 0 else None
        return [pack(groups, multiple, share_prompts, self.device, chunk, chunks, pixels) for groups in laid]

    @verb
    def exchange(self, routes: Routes, minibatches: Sequence[MicroBatches], share_prompts: bool) -> Exchanged:
        """Send the samples that this rank made to where they are trained on, and keep those that come; see `bring`."""
        held = {sample: self.made(sample) for sample in routes}
        self.groups = list(minibatches)
        self.share_prompts = share_prompts
        self.packs, self.samples, sent = self.bring(held, routes, minibatches, share_prompts)
        packs = [pack for packs in self.packs for pack in packs]
        return Exchanged(
            network_bytes=sent,
            tokens=sum(pack.tokens.shape[1] for pack in packs),
            padding_tokens=sum(pack.padding_tokens for pack in packs),
        )

    def forward_packs(self, left_out: int = 0) -> list[Packed]:
        """Return the micro-batches of passes without gradients: those of training, several of them laid out as one.

        `left_out`: mini-batches at the beginning that are not looked at.
        """
        train, packs = self.config.train, [pack for packs in self.packs[left_out:] for pack in packs]
        larger = train.tokens_per_forward_microbatch
        together = larger // train.microbatch_tokens if larger else 1
        if together < 2 or not packs:
            return packs
        # The same number on each rank, or those that share experts would wait for each other.
        groups = [groups for microbatches in self.groups[left_out:] for groups in microbatches]
        parts = [groups[at : at + together] for at in range(0, len(groups), together)]
        joined = [[[self.samples[i] for i in group] for groups in part for group in groups] for part in parts]
        return self.pack(joined, self.share_prompts)

    @verb
    def put(self, field: str, values: Mapping[int, float]) -> None:
        """Set a field of those samples that this rank trains on: one number for each of a sample's loss tokens."""
        for sample, value in values.items():
            if sample in self.samples:
                self.samples[sample].put(field, value)

    @verb
    def score(self, model: str, left_out: int = 0) -> dict[str, float]:
        """Have a model give each sample its log-probabilities, or its values; returns the seconds of moving models.

        `left_out`: mini-batches at the beginning that get none.
        """
        found, seconds = self.forward(model, self.forward_packs(left_out))
        field = "values" if self.models[model].shape.head == "value" else f"{model}_logprobs"
        for packed, values in found:
            packed.put(field, values)
        return seconds if model in self.learners else {f"{model}_{move}": took for move, took in seconds.items()}

    @verb
    def sample_kl(self) -> list[tuple[int, float]]:
        """Return, on the ranks that report, the sum of each sample's estimated divergence from the reference."""
        if not self.place.reports:
            return []
        kind, found = self.config.algorithm.kl_estimator, []
        for packed in (packed for packs in self.packs for packed in packs if packed.samples):
            policy, reference = packed.field("policy_logprobs"), packed.field("reference_logprobs")
            sums = sample_kl(policy, reference, packed.lengths, kind).tolist()
            found += [(sample.id, kl) for sample, kl in zip(packed.samples, sums, strict=True)]
        return found

    def forward(
        self, model: str, packs: Sequence[Packed]
    ) -> tuple[list[tuple[Packed, torch.Tensor]], dict[str, float]]:
        """Return what a model says (ShardedModel.forward), and the seconds of moves: of learners as `take_turns` says,
        of a frozen model onload and offload."""
        here = self.models[model]
        if model in self.learners:
            seconds = take_turns(self.learners, model)
            return here.forward(packs), seconds
        started = time.perf_counter()
        here.onload()
        onloaded = time.perf_counter()
        found = here.forward(packs)
        scored = time.perf_counter()
        here.offload()
        return found, {"onload": onloaded - started, "offload": time.perf_counter() - scored}

    @verb
    def learn(self, model: str, minibatch: int, learning_rate: float) -> Learned:
        """Make one optimizer step of a model on a mini-batch."""
        train, moves = self.config.train, take_turns(self.learners, model)
        limits = Limits(train.grad_norm_bound, train.kl_bound) if model == "policy" else Limits()
        learned = self.learners[model].learn(self.packs[minibatch], self.losses[model], learning_rate, limits)
        learned.moves = moves
        return learned

    @verb
    def export_hf(self, directory: str) -> None:
        """Write the policy as a Hugging Face directory, and what else learns beside it, all ranks together."""
        world = self.world
        for name, learner in self.learners.items():
            take_turns(self.learners, name)
            model, path = learner.model, directory if name == "policy" else f"{directory}_{name}"
            shards = [megatron_shard(model.shape, model.layout, rank) for rank in range(world.size)]
            weights, stored = model.merged_weights(), model.stored
            export.export_hf(path, model.path, model.shape, shards, weights, world.rank, world.payload, stored=stored)

    @verb
    def forget(self) -> None:
        """Drop the samples."""
        self.samples, self.packs, self.groups = {}, [], []
