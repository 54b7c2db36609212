"""One rank of tests/spmd/test_second_learner.py: a policy and a toy critic, on samples that a tool wrote into."""

import dataclasses
import hashlib
from pathlib import Path

from spmd.ranks import arguments, end_megatron, join, ready, report

# Small, so that the first step of Adam does not go too far.
RATE = 2e-5


def main() -> None:
    world = join(ready("megatron_core"))
    report(world.rank, {"cases": [_case(given, world) for given in arguments()["cases"]]})


def _case(given: dict, world) -> dict:
    import torch

    from spmd.samples import advantages_of, own_sums
    from spmd_rl.worker.shard_saver import ShardSaver

    found: dict = {}
    trainer = _start(given, world)
    samples, travelled = _exchange(given, trainer, world)
    found["images"] = travelled
    trainer.put("advantages", advantages_of(samples))
    total = sum(sample.loss_tokens for sample in samples.values())
    trainer.put("weights", dict.fromkeys(samples, 1.0 / total))
    trainer.put("returns", {id: 0.1 * id - 0.5 for id in samples})

    def step() -> dict:
        trainer.score("policy")
        trainer.score("critic")
        learned = {name: trainer.learn(name, 0, RATE) for name in ("critic", "policy")}
        return {name: {"sums": own_sums(one), "grad_norm": one.grad_norm} for name, one in learned.items()}

    found["first"] = step()
    found["masked"] = all(
        not sample.fields[field][~sample.loss_mask].any()
        for sample in trainer.samples.values()
        for field in ("policy_logprobs", "values", "advantages", "weights")
        if field in sample.fields
    )
    found["values"] = trainer.place.last_stage and all("values" in one.fields for one in trainer.samples.values())
    saver, directory = ShardSaver(trainer.learners, world), Path(given["checkpoint"])
    found["bytes"] = saver.checkpoint_bytes() > 0
    saver.begin_checkpoint(str(directory))
    found["saved"] = saver.checkpoint_progress(wait=True).failed
    found["switched"] = _switch(trainer, world)
    kept, packs = trainer.samples, trainer.packs
    found["second"] = step() | {"weights": _weights(trainer)}
    # From the checkpoint it goes on as if nothing had been: in models and optimizers that are new.
    end_megatron()
    trainer = _start(given, world)
    ShardSaver(trainer.learners, world).load(directory, only_weights=False)
    trainer.samples, trainer.packs = kept, packs
    found["resumed"] = step() | {"weights": _weights(trainer)}
    end_megatron()
    trainer = _start(given, world)
    ShardSaver(trainer.learners, world).load(directory, only_weights=True)
    found["critic_alone"] = trainer.models["critic"].broken() == ""
    end_megatron()
    found["loss_tokens"] = total
    torch.distributed.barrier()
    return found


def _start(given: dict, world):
    """A trainer of a policy, to which a critic is added."""
    import torch

    from spmd_rl.config.config import Config, ModelConfig
    from spmd_rl.models.model_shape import read_model_shape
    from spmd_rl.training.learner import LossResult
    from spmd_rl.worker.trainer import Trainer

    def value_loss(packed, values: torch.Tensor) -> LossResult:
        loss = 0.5 * (values - packed.field("returns")).square()  # [N]
        return LossResult(
            total=(packed.field("weights") * loss).sum(),
            sums={"tokens": torch.ones_like(values).sum(), "critic/value_loss": loss.detach().sum()},
        )

    base = Config(model=ModelConfig(path=given["policy"], dtype="float32"))
    config = dataclasses.replace(base, parallel=dataclasses.replace(base.parallel, **given["parallel"]))
    trainer = Trainer(config, read_model_shape(given["policy"]), torch.device("cpu"), world)
    shape = read_model_shape(given["critic"])
    trainer.add("critic", trainer.built(given["critic"], shape), value_loss)
    return trainer


def _exchange(given: dict, trainer, world) -> tuple[dict, bool]:
    """Bring each sample from the rank that made it to where it is trained on; all samples, and whether all is there."""
    import torch

    from spmd.samples import make_samples
    from spmd_rl.controller.planner import plan_microbatches

    samples, tickets = make_samples(trainer.models["policy"].shape.vocabulary)
    for id, sample in samples.items():
        sample.fields["pixel_values"] = torch.full((3, 4, 1 + id), id, dtype=torch.uint8)
        sample.fields["image_grid"] = torch.tensor([[1, 2, id]])
        # Nobody drew what a tool answered.
        sample.fields["rollout_logprobs"] = sample.fields["rollout_logprobs"].where(sample.loss_mask, torch.nan)
    plan = plan_microbatches(tickets, trainer.layout.data, 1, 70, True)
    minibatches = [minibatch.microbatches for minibatch in plan.minibatches]
    mine = [minibatch[trainer.place.data_rank] for minibatch in minibatches]
    made = {id: sample for id, sample in samples.items() if id % world.size == world.rank}
    routes = {
        id: data_rank
        for minibatch in minibatches
        for data_rank, batches in enumerate(minibatch)
        for batch in batches
        for group in batch
        for id in group
    }
    trainer.made = made.__getitem__
    trainer.exchange({id: routes[id] for id in made}, mine, True)
    ids = {id for batches in mine for batch in batches for group in batch for id in group}
    same = trainer.samples.keys() == ids and all(
        torch.equal(one.tokens, samples[id].tokens)
        and torch.equal(one.loss_mask, samples[id].loss_mask)
        and all(torch.equal(one.fields[name], samples[id].fields[name]) for name in ("pixel_values", "image_grid"))
        for id, one in trainer.samples.items()
    )
    return samples, same


def _switch(trainer, world) -> bool:
    """Whether all learners make room for an engine, which gets the policy's weights, and come back."""
    import torch

    from spmd_rl.distributed.layout import RolloutLayout
    from spmd_rl.platforms import current
    from spmd_rl.worker.device_switch import DeviceSwitch

    class Anything:
        """Whatever is asked of it is done at once."""

        def __getattr__(self, name: str):
            return lambda *arguments: None

    class Weights(Anything, dict):
        """The parameters of an engine."""

    class Engine(Anything):
        """As much of one as a switch asks for."""

        weights = Weights()

    layout = RolloutLayout(world.size, world.size)
    switch = DeviceSwitch(trainer, Engine(), world, layout, 1 << 20, current())
    switch.engine.weights |= {name: torch.empty(shape) for name, shape in switch.destination.params.items()}
    switch.to_rollout()
    gone = all(learner.gradients.released for learner in trainer.learners.values())
    switch.to_training()
    return gone


def _weights(trainer) -> dict[str, str]:
    """A digest of this rank's weights and optimizer of each learner."""
    found = {}
    for name, learner in trainer.learners.items():
        tensors = [*learner.model.weights().items(), *learner.optimizer.tensors()]
        state = b"".join(tensor.detach().contiguous().view(-1).numpy().tobytes() for _, tensor in tensors)
        found[name] = hashlib.sha256(state).hexdigest()
    return found
