"""Estimate the seconds of each phase of a step, from a device's figures and the parts of them that are reached."""

import math
from dataclasses import dataclass

from spmd_rl.config.engine_cache import BYTES, CacheNeed
from spmd_rl.config.names import Phase
from spmd_rl.estimate.micro_batch import split
from spmd_rl.estimate.rank_memory import Run
from spmd_rl.estimate.work import Work
from spmd_rl.platforms.devices import Device


@dataclass(frozen=True)
class Held:
    """Hold the bytes that phases move, of the rank that has most."""

    weights: int
    engine: int
    cache: float
    optimizer: int
    near: int
    """Received in a refresh from the same node."""
    far: int
    """From other nodes."""


@dataclass(frozen=True)
class StepTime:
    """Compute the seconds of one step."""

    run: Run
    device: Device
    held: Held
    ranks_per_node: int
    work: Work

    def seconds(self) -> dict[str, float]:
        """Return them by phase, in the order of a step."""
        config, algorithm = self.run.config, self.run.config.algorithm
        found: dict[str, float] = {Phase.TO_ROLLOUT: self._refresh(), Phase.ROLLOUT: self._rollout()}
        found[Phase.TO_TRAINING] = self._host(self.held.weights)
        passes = self._forward()
        train = config.train
        ratio = algorithm.old_logprobs == "trainer"
        whole = train.epochs > 1 or train.shuffle_mini_batch and train.minibatches > 1
        if algorithm.kl_in_reward or ratio and whole:
            found[Phase.POLICY_LOGPROBS] = passes
        elif ratio and train.minibatches > 1:
            found[Phase.POLICY_LOGPROBS] = passes * (1 - 1 / train.minibatches)  # the first needs none
        if algorithm.uses_reference:
            found[Phase.REFERENCE_LOGPROBS] = passes + self._host(2 * self.held.weights)
        update = self._update()
        if algorithm.uses_critic:
            found[Phase.CRITIC_VALUES] = passes
            found[Phase.CRITIC_UPDATE] = update * config.critic_epochs / train.epochs
        return found | {Phase.UPDATE: update}

    def tokens(self) -> float:
        """Return the tokens of a step, as e2e_tps counts them: prompts and responses of all samples."""
        config, lengths = self.run.config, self.run.lengths
        samples = config.train.prompts_per_step * config.algorithm.samples_per_prompt
        return samples * (lengths.prompt + lengths.response)

    def _host(self, size: float) -> float:
        return 0.0 if self.run.kernels.stays else size / (self.device.host * self.device.wire)

    def _refresh(self) -> float:
        """Messages over both kinds of link at once, the copy into the engine, and moves between device and host."""
        device, held = self.device, self.held
        near, far = held.near / (device.link * device.wire), held.far / (device.network * device.wire)
        return max(near, far) + 2 * held.engine / (device.bandwidth * device.decode) + self._host(held.weights)

    def _rollout(self) -> float:
        """Prompts in one product, then a token a step of what the cache holds: it and the weights are read."""
        run, device, config = self.run, self.device, self.run.config
        need = CacheNeed.of(config, run.shape, run.rollout.world)
        length, tensor = run.lengths, run.rollout.tensor
        prompts = need.of_replica / config.algorithm.samples_per_prompt * length.prompt
        prefill = 2 * self.work.active * prompts / tensor / (device.flops * device.efficiency)
        sample = need.token_bytes * (length.prompt + length.response)
        together = max(1.0, min(need.at_once, need.of_replica, self.held.cache / sample))
        rounds = max(1.0, need.of_replica / together)
        read = self.held.engine * self._experts_read(together) + together * sample * self._half_written()
        computed = 2 * (self.work.active + self.work.head) * together / tensor / (device.flops * device.efficiency)
        reduce = 2 * run.shape.layers * self._ring(together * run.shape.hidden, tensor)
        step = max(read / (device.bandwidth * device.decode), computed) + reduce
        return prefill + rounds * length.response * (step + run.shape.layers * device.layer_seconds)

    def _half_written(self) -> float:
        """The part of a sample's cache that is read in a step, on average: prompt and half of the response."""
        length = self.run.lengths
        return (length.prompt + length.response / 2) / (length.prompt + length.response)

    def _experts_read(self, together: float) -> float:
        """The part of an engine's weights that a step reads: of the experts, those that its tokens chose."""
        experts = self.run.shape.experts
        if experts is None:
            return 1.0
        tokens = together * (self.run.rollout.data if self.run.rollout.expert else 1)
        chosen = 1 - (1 - experts.per_token / experts.count) ** tokens
        routed = 3 * experts.ffn * self.run.shape.hidden * experts.count * sum(experts.sparse) / self.work.total
        return 1 - routed + routed * chosen

    def _forward(self) -> float:
        """One pass over a step's samples without gradients."""
        train = self.run.config.train
        return train.minibatches * self._passes(1.0, train.tokens_per_forward_microbatch or 0)

    def _update(self) -> float:
        """All passes with gradients, the sum of the gradients, and the optimizer's steps."""
        run, train, device = self.run, self.run.config.train, self.device
        again = {"none": 0.0, "selective": 0.1, "full": 1.0}[train.recomputes]
        if train.recomputes == "full" and train.recompute_layers:
            again = min(1.0, train.recompute_layers * run.train.pipeline / run.shape.layers)
        passes = self._passes(3.0 + again)
        parameters = self.held.weights / BYTES[run.config.model.dtype]
        data = run.train.data * run.train.context
        gradients = 1.5 * self._ring(parameters, data, size=4, stride=run.train.tensor)
        moved = 2 * self._host(self.held.optimizer) + 3 * self.held.optimizer / (device.bandwidth * device.decode)
        return train.minibatches * train.epochs * (passes + gradients + moved)

    def _passes(self, factor: float, budget: int = 0) -> float:
        """One mini-batch through the pipeline, `factor` forward passes' worth of each micro-batch."""
        run, device = self.run, self.device
        layout = run.train
        one = split(run.config, layout.data, run.lengths, budget)
        ranks = layout.tensor * layout.context * layout.pipeline
        computed = factor * self.work.forward(one.batch) / ranks / (device.flops * device.efficiency)
        rows = one.batch.tokens / layout.context * run.shape.hidden
        layers = run.shape.layers / layout.pipeline
        # Two sums over the tensor ranks in a forward pass of a layer, as many in a backward pass.
        reduce = (2 if factor <= 1 else 2 + math.ceil(factor) - 1) * layers * self._ring(rows, layout.tensor)
        experts = run.shape.experts
        if experts is not None and layout.expert > 1:
            sent = rows / layout.tensor * experts.per_token * (1 - 1 / layout.expert) * BYTES[run.config.model.dtype]
            wire = self._wire(layout.expert * layout.expert_tensor)
            reduce += 2 * min(factor, 2.0 + factor / 3) * layers * sum(experts.sparse) / run.shape.layers * sent / wire
        bubble = (layout.pipeline - 1) / layout.virtual
        return (one.count + bubble) * (computed + reduce)

    def _ring(self, elements: float, ranks: int, size: int = 0, stride: int = 1) -> float:
        """Seconds of a sum over `ranks`, every `stride`-th one: each sends all but its own part, twice."""
        if ranks == 1:
            return 0.0
        moved = 2 * (ranks - 1) / ranks * elements * (size or BYTES[self.run.config.model.dtype])
        return moved / self._wire(ranks * stride)

    def _wire(self, span: int) -> float:
        """Bytes a second to the others of a group that spans so many ranks."""
        device = self.device
        return device.wire * (device.link if span <= self.ranks_per_node else device.network)
