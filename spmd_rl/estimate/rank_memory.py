"""Put together what a rank holds in each phase: models, what passes make beside them, the engine's work, libraries."""

from dataclasses import dataclass

from spmd_rl.config.config import Config
from spmd_rl.config.engine_cache import BYTES
from spmd_rl.config.names import Phase
from spmd_rl.distributed.layout import RolloutLayout, TrainLayout
from spmd_rl.estimate.activations import Activations, Passes
from spmd_rl.estimate.micro_batch import Lengths, budget_tokens, full, split
from spmd_rl.models.model_shape import ModelShape
from spmd_rl.platforms.kernels import Kernels
from spmd_rl.weights.device_memory import RankBytes

PARTS = (
    *("libraries", "weights", "gradients", "optimizer", "reference", "reward model", "critic", "engine", "cache"),
    *("buckets", "files", "engine's work", "activations", "logits"),
)
"""In the order in which they are stacked, from what stays to what comes and goes."""
_FLOAT, _DEFAULT_BATCHED = 4, 2048
_LEARNING = (Phase.UPDATE, Phase.CRITIC_UPDATE)
_SCORING = (Phase.POLICY_LOGPROBS, Phase.REFERENCE_LOGPROBS, Phase.CRITIC_VALUES, Phase.REWARD_MODEL)
Parts = dict[str, int]


@dataclass(frozen=True)
class Run:
    """Hold what the memory of a rank depends on."""

    config: Config
    shape: ModelShape
    train: TrainLayout
    rollout: RolloutLayout
    kernels: Kernels
    lengths: Lengths

    def passes(self, stage: int) -> tuple[Passes, Passes]:
        """Return a stage's peaks of the passes with gradients, and of those without."""
        one = split(self.config, self.train.data, self.lengths)
        budget = budget_tokens(self.config)
        forward = self.config.train.tokens_per_forward_microbatch or budget
        other = split(self.config, self.train.data, self.lengths, forward)
        batches = full(one, budget), full(other, forward)
        learning, scoring = (Activations(self.config, self.shape, self.train, self.kernels, batch) for batch in batches)
        return learning.learning(stage, one.count), scoring.scoring(stage)

    def engine_work(self) -> int:
        """Return what the engine takes beside weights and cache: one step's activations, and the logits it samples
        from."""
        shape, tensor, size = self.shape, self.rollout.tensor, BYTES[self.config.model.dtype]
        batched = self.config.rollout.max_batched_tokens or max(_DEFAULT_BATCHED, self.config.longest_sample)
        channels = shape.ffn if shape.experts is None else shape.experts.per_token * shape.experts.ffn
        step = size * batched * (3 * shape.hidden + 3 * channels / tensor)
        # Logits in fp32, their log-probabilities, and what is sorted or drawn beside them.
        return int(step + 3 * _FLOAT * (self.config.rollout.max_sequences or 1) * shape.vocabulary)


def parts_by_phase(run: Run, held: RankBytes, stage: int) -> dict[str, Parts]:
    """Return of each phase, in the order of a step, what makes its peak on a rank of a pipeline stage."""
    learning, scoring = run.passes(stage)
    found: dict[str, Parts] = {}
    for phase, models in held.parts().items():
        parts = _with_what_stays(held, phase, run.kernels) if run.kernels.stays else dict(models)
        if phase in _LEARNING:
            parts = _learning(parts, learning, run.kernels)
        elif phase in _SCORING:
            parts |= {"activations": scoring.activations, "logits": scoring.logits}
        elif phase == Phase.ROLLOUT:
            parts["engine's work"] = run.engine_work()
        parts["libraries"] = 0 if run.kernels.stays and phase == Phase.START else run.kernels.libraries
        found[phase] = {name: parts[name] for name in PARTS if parts.get(name)}
    if run.kernels.stays:
        # The heap gives back what a phase has freed when the device changes hands, and then the next one has begun.
        for phase, before in ((Phase.TO_ROLLOUT, Phase.UPDATE), (Phase.TO_TRAINING, Phase.ROLLOUT)):
            left = {name: size for name, size in found[before].items() if name != "logits"}
            found[phase] = max(found[phase], left, key=_total)
    return found


def _learning(parts: Parts, passes: Passes, kernels: Kernels) -> Parts:
    """Return the larger of passes and optimizer step: between steps the optimizer waits on the host."""
    inside = parts | {"activations": passes.activations, "logits": passes.logits}
    if kernels.stays:
        return inside
    del inside["optimizer"]
    return max(parts, inside, key=_total)


def _with_what_stays(held: RankBytes, phase: str, kernels: Kernels) -> Parts:
    """Return a phase's models on a machine of one memory, where nothing goes elsewhere; from the second step on."""
    policy, critic = held.learners["policy"], held.learners.get("critic")
    there = {
        "weights": policy.weights,
        "optimizer": policy.optimizer,
        "reference": held.reference,
        "reward model": sum(held.judges.values()),
        "critic": critic.weights + critic.optimizer if critic else 0,
    }
    gradients, engine = {"gradients": policy.gradients}, {"engine": held.engine, "cache": held.cache}
    if phase == Phase.START:
        # The engine is made behind the models, and its weights and cache are written in the first refresh.
        there |= {"optimizer": policy.masters, "critic": critic.weights + critic.masters if critic else 0}
        return there | max({"files": held.files - kernels.engine}, {"engine": held.unwritten}, key=_total)
    if phase == Phase.ROLLOUT:
        return there | engine
    if phase == Phase.TO_ROLLOUT:
        # The gradients of the last update go first.
        return there | max(gradients, engine | {"buckets": held.buckets}, key=_total)
    if phase == Phase.CRITIC_UPDATE and critic is not None:
        there["critic"] += critic.gradients
    return there | (gradients if phase in (Phase.UPDATE, Phase.CHECKPOINT) else {})


def _total(parts: Parts) -> int:
    return sum(parts.values())
