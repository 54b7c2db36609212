"""One rank of tests/spmd/test_second_learner.py: a policy and its critic, on samples that a tool wrote into."""

import dataclasses
import hashlib
from pathlib import Path

from spmd.ranks import arguments, end_megatron, join, ready, report

# Small, so that the first step of Adam does not go too far.
RATE = 2e-5
BETA = 0.1


def main() -> None:
    world = join(ready("megatron_core"))
    report(world.rank, {"cases": [_case(given, world) for given in arguments()["cases"]]})


def _case(given: dict, world) -> dict:
    import torch

    from spmd.samples import advantages_of, own_sums, perturb
    from spmd.training_ranks import compare
    from spmd_rl.algorithms.token_statistics import GAE_SPREADS, Spread, joined, whitening
    from spmd_rl.distributed.gather import gather
    from spmd_rl.worker.gae_estimator import GaeEstimator
    from spmd_rl.worker.shard_saver import ShardSaver

    found: dict = {}
    trainer = _start(given, world)
    samples, travelled = _exchange(given, trainer, world)
    found["images"] = travelled
    total = sum(sample.loss_tokens for sample in samples.values())
    trainer.put("weights", dict.fromkeys(samples, 1.0 / total))
    earned = advantages_of(samples)

    def step() -> dict:
        """One of PPO, as controller/session.py has the ranks do it."""
        for model in ("policy", "reference", "critic"):
            trainer.score(model)
        scored = _masked(trainer, "policy_logprobs", "reference_logprobs", "values")
        perturb(trainer.samples.values())
        estimator = GaeEstimator(trainer)
        mine = estimator.estimate_gae({id: earned[id] for id in trainer.samples}, BETA).told
        told = [one for each in gather(mine, world.payload) for one in each]
        spreads = {name: joined(Spread.of(one[name]) for one in told) for name in GAE_SPREADS}
        estimator.whiten("advantages", *whitening(spreads["advantages"].moments))
        found["told"] = {name: dataclasses.asdict(spread) for name, spread in spreads.items()}
        found["fields"] = _fields(trainer)
        found["masked"] = scored and _masked(trainer, "advantages", "returns", "weights")
        for sample in trainer.samples.values():
            if "values" in sample.fields:  # as if updates had come before this one
                sample.fields["values"] = sample.fields["values"] + shift(sample)
        before = {name: tensor.clone() for name, tensor in trainer.models["critic"].weights().items()}
        learned = {"critic": trainer.learn("critic", 0, RATE)}
        found["gradients"] = compare(trainer.learners["critic"], before, given["gradients"])[0]
        learned["policy"] = trainer.learn("policy", 0, RATE)
        found["moves"] = [sorted(one.moves) for one in learned.values()]
        return {name: {"sums": own_sums(one), "grad_norm": one.grad_norm} for name, one in learned.items()}

    found["first"] = step()
    first = {name: found[name] for name in ("told", "fields", "gradients", "moves")}
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
    saver = ShardSaver(trainer.learners, world)
    found["critic_alone"] = saver.load(directory, only_weights=True) == [] and not trainer.models["critic"].broken()
    # As if GRPO had saved it.
    torch.distributed.barrier()
    if world.rank == 0:
        (directory / "training_critic").rename(directory.parent / "of_the_critic")
    torch.distributed.barrier()
    found["policy_alone"] = saver.load(directory, only_weights=True) == ["critic"]
    torch.distributed.barrier()
    if world.rank == 0:
        (directory.parent / "of_the_critic").rename(directory / "training_critic")
    end_megatron()
    found |= first | {"loss_tokens": total}
    torch.distributed.barrier()
    return found


def _start(given: dict, world):
    """A trainer of a policy and a critic."""

    from spmd_rl.config.config import AlgorithmConfig, Config, ModelConfig, ParallelConfig
    from spmd_rl.config.critic_config import CriticConfig
    from spmd_rl.models.model_shape import read_model_shape
    from spmd_rl.platforms import current
    from spmd_rl.worker.trainer import Trainer

    config = Config(
        model=ModelConfig(path=given["policy"], dtype="float32"),
        parallel=ParallelConfig(**given["parallel"]),
        algorithm=AlgorithmConfig(advantage="gae", kl_coefficient=BETA, kl_in_reward=True, **given["algorithm"]),
        # The norm is computed, and the gradients stay as they are.
        critic=CriticConfig(path=given["critic"], clip_grad=1e9),
    )
    return Trainer(config, read_model_shape(given["policy"]), current().device(world.local_rank), world)


def shift(sample):
    """Return how far the values before the update are from those of now [R]."""
    import torch

    return 0.4 * torch.sin(2.0 * torch.arange(len(sample.response)) + sample.id)


def _masked(trainer, *fields: str) -> bool:
    """Return whether these fields are 0 where the policy did not write."""
    return all(
        not sample.fields[field][~sample.loss_mask].any()
        for sample in trainer.samples.values()
        for field in fields
        if field in sample.fields
    )


def _fields(trainer) -> dict[int, dict[str, list[float]]]:
    """Return what this rank's samples got at their loss tokens, on ranks that report."""
    return {
        id: {name: sample.at_loss_tokens(name).tolist() for name in ("values", "advantages", "returns")}
        for id, sample in trainer.samples.items()
        if trainer.place.reports and sample.loss_tokens
    }


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
    """Return whether all learners make room for an engine, which gets the policy's weights, and come back."""
    import torch

    from spmd_rl.distributed.layout import RolloutLayout
    from spmd_rl.platforms import current
    from spmd_rl.worker.device_switch import DeviceSwitch

    class Anything:
        """Whatever is asked of it is done at once."""

        def __getattr__(self, name: str):
            return lambda *arguments: None

    class Weights(Anything, dict):
        """The parameters of an engine, none of which is frozen."""

        held: frozenset[str] = frozenset()

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
