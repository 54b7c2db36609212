"""One rank of tests/spmd/test_training.py: the same samples under many layouts, in one process."""

import dataclasses
import gc
import math

from spmd.ranks import arguments, end_megatron, join, ready, report

LEARNING_RATE, EPSILON = 0.1, 1e-2


def main() -> None:
    platform = ready("megatron_core")
    from megatron.core import parallel_state  # noqa: F401  (what is imported now is no garbage later)

    from spmd_rl.worker import trainer  # noqa: F401

    world = join(platform)
    gc.freeze()
    results = []
    for asked in arguments()["cases"]:
        results.append(_case(asked, world, platform))
        # What held the process groups goes, and most of their threads with it.
        end_megatron()
        gc.collect()
    report(world.rank, {"cases": results})


def _case(case: dict, world, platform) -> dict:
    """Train as one case asks, and return what came of it."""

    from spmd.samples import make_samples, own_sums, perturb, put_what_is_learned
    from spmd_rl.config.config import Config, ModelConfig
    from spmd_rl.models.model_shape import read_model_shape
    from spmd_rl.platforms import current
    from spmd_rl.training import optimizer_parts
    from spmd_rl.worker.trainer import Trainer

    optimizer_parts.PART_BYTES = case.get("part_bytes", 2 << 30)
    current(case.get("platform", platform.name))
    shape = read_model_shape(case["model"])
    base = Config(model=ModelConfig(path=case["model"]))
    config = dataclasses.replace(
        base,
        model=dataclasses.replace(
            base.model,
            path=case["model"],
            dtype=case.get("dtype", "float32"),
            freeze=tuple(case.get("freeze", ["none"])),
        ),
        parallel=dataclasses.replace(base.parallel, **case["parallel"]),
        algorithm=dataclasses.replace(base.algorithm, **case.get("algorithm", {})),
        train=dataclasses.replace(
            base.train,
            logprob_chunk_tokens=case.get("chunk", 7),
            recompute=case.get("recompute", "none"),
            recompute_layers=case.get("recompute_layers"),
            recompute_modules=tuple(case.get("recompute_modules", ["core_attn"])),
            moe_aux_loss_coefficient=case.get("balance", 0.0),
            # The norm is computed, and the gradients stay as they are.
            clip_grad=1e9,
            # AdamW's first step, as a smooth function of the gradient.
            adam_epsilon=EPSILON,
            weight_decay=0.0,
        ),
        rollout=dataclasses.replace(base.rollout, temperature=case.get("temperature", 0.8)),
    )
    trainer = Trainer(config, shape, platform.device(world.local_rank), world)
    place, learner = trainer.place, trainer.learners["policy"]
    policy = learner.model
    assert policy.weights().keys() == policy.shard.params.keys()
    if "score" in case:
        return score(case, trainer)
    if "checkpoint" in case:
        return go_on(case, trainer)
    samples, tickets = make_samples(shape.vocabulary, shape.vision)
    packs = lay_out(case, trainer, samples, tickets)
    for model in trainer.models:
        trainer.score(model)
    scored = {
        sample.id: sample.fields["policy_logprobs"].tolist()
        for pack in packs
        for sample in pack.samples
        if place.reports
    }
    perturb(samples.values())
    before = {name: tensor.clone() for name, tensor in policy.weights().items()}
    put_what_is_learned(samples)
    kept = keeps_to_limits(trainer) if case.get("limits") else None
    learned = trainer.learn("policy", 0, LEARNING_RATE)
    # On a CPU nothing moves, and what would is looked up all the same.
    with learner.optimizer.on_device():
        pass
    compared = compare(learner, before, case["gradients"]) if "gradients" in case else ({}, {})
    with learner.optimizer.on_device():  # its moments are read
        skipped = skips_what_is_not_finite(learner, world.rank == world.size - 1)
    return {
        "grad_norm": learned.grad_norm,
        "sums": own_sums(learned),
        "logprobs": scored,
        "microbatches": len(packs),
        "tokens": sum(pack.tokens.shape[1] for pack in packs),
        "gradients": compared[0],
        "steps": compared[1],
        "limits": kept,
        "skipped": skipped,
    }


def keeps_to_limits(trainer) -> dict:
    """Return what is said of updates beyond a bound, whether weights stayed, and each sample's divergence."""
    import torch

    from spmd_rl.training.learner import Limits

    learner, weights = trainer.learners["policy"], trainer.models["policy"].weights()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    said = []
    for limits in (Limits(grad_norm=1e-6), Limits(kl=1e-6), Limits(grad_norm=1e-6, kl=1e6)):
        learned = learner.learn(trainer.packs[0], trainer.losses["policy"], LEARNING_RATE, limits)
        said.append([learned.updated, learned.beyond, learned.suspects])
    alone = learner.learn(trainer.packs[0], errs_on_the_last_rank(trainer), LEARNING_RATE)
    same = all(torch.equal(before[name], tensor) for name, tensor in weights.items())
    kept = {"said": said, "same": same, "kl": trainer.sample_kl()}
    return kept | {"alone": [alone.updated, math.isfinite(alone.grad_norm), alone.losses_broken]}


def errs_on_the_last_rank(trainer):
    """Return the policy's loss, which is no number on the last rank, and has its gradient there too."""
    import dataclasses

    import torch.distributed as dist

    loss = trainer.losses["policy"]

    def errs(*given):
        result = loss(*given)
        if dist.get_rank() < dist.get_world_size() - 1:
            return result
        return dataclasses.replace(result, sums=result.sums | {"actor/pg_loss": result.total.detach() * math.nan})

    return errs


def lay_out(case, trainer, samples, tickets) -> list:
    """Lay out this rank's samples as its one mini-batch."""
    from spmd_rl.controller.planner import plan_microbatches

    plan = plan_microbatches(tickets, trainer.layout.data, 1, case["budget"], case["share"])
    mine = plan.minibatches[0].microbatches[trainer.place.data_rank]
    packs = trainer.pack([[[samples[i] for i in group] for group in batch] for batch in mine], case["share"])
    trainer.packs = [packs]
    return packs


def skips_what_is_not_finite(learner, here: bool) -> bool:
    """Return whether weights and moments stay when a gradient is not finite: of one rank, which is here or not."""
    import torch

    from spmd_rl.training.sharded_model import first_not_finite

    policy = learner.model
    state = {f"weight {name}": tensor for name, tensor in policy.weights().items()}
    state |= {f"{number} {name}": tensor for number, (name, tensor) in enumerate(learner.optimizer.tensors())}
    before = {name: tensor.clone() for name, tensor in state.items()}
    trained = {name: weight for name, weight in policy.module.named() if weight.requires_grad}
    names = list(trained)
    skipped = len(before) > len(names)
    # What all tensor ranks hold alike: the norm has it of the first.
    alike = [weight for weight in trained.values() if not getattr(weight, "tensor_model_parallel", False)]
    sound = [weight.main_grad.clone() for weight in alike]
    for value in (float("nan"), float("-inf")):
        if policy.place.tensor_rank == policy.place.tensor_size - 1:
            for parameter in alike:
                parameter.main_grad.fill_(value)
        skipped &= not learner.optimizer.step(LEARNING_RATE)[0]
    for parameter, gradient in zip(alike, sound, strict=True):
        parameter.main_grad.copy_(gradient)
    made, norm = learner.optimizer.step(LEARNING_RATE, sound=not here)
    skipped &= not made and math.isfinite(norm)
    for value in (float("nan"), float("inf")):
        if here:
            for parameter in trained.values():
                parameter.main_grad.fill_(value)
        made, norm = learner.optimizer.step(LEARNING_RATE)
        skipped &= not made and not math.isfinite(norm)
    broken = first_not_finite((name, parameter.main_grad) for name, parameter in trained.items())
    skipped &= (broken == names[0]) if here else True
    skipped &= learner.broken() == ""
    skipped &= all(torch.equal(before[name], tensor) for name, tensor in state.items())
    # What would be saved is looked at to the last element, and large values are not taken for infinite ones.
    name, weight = next(reversed(policy.weights().items()))
    for value, broken in ((torch.finfo(weight.dtype).max, ""), (math.nan, name), (-math.inf, name)):
        weight.view(-1)[-2:] = value
        skipped &= learner.broken() == broken
    return skipped


def go_on(case, trainer) -> dict:
    """Two steps from a checkpoint, which the case that `begins` makes after a first step and the others take up."""
    from pathlib import Path

    from spmd.samples import make_samples, own_sums, perturb, put_what_is_learned
    from spmd_rl.worker.shard_saver import ShardSaver

    def step(rate: float) -> dict:
        shape = trainer.models["policy"].shape
        samples, tickets = make_samples(shape.vocabulary, shape.vision)
        lay_out(case, trainer, samples, tickets)
        trainer.score("policy")
        trainer.score("reference")
        perturb(samples.values())
        put_what_is_learned(samples)
        learned = trainer.learn("policy", 0, rate)
        return {"sums": own_sums(learned), "grad_norm": learned.grad_norm}

    learner = trainer.learners["policy"]
    if "part_bytes" in case:
        learner.optimizer.offload()
    saving, directory = ShardSaver(trainer.learners, trainer.world), Path(case["checkpoint"])
    if case["begins"]:
        step(1e-3)
        saving.begin_checkpoint(str(directory))
        assert saving.checkpoint_progress(wait=True).failed is None
    else:
        saving.load(directory, only_weights=False)
    steps = [step(1e-3), step(1e-3)]
    held = [*learner.model.weights().values(), *(tensor.float().clone() for _, tensor in learner.optimizer.tensors())]
    sums = sorted(float(tensor.double().sum()) for tensor in held)
    return {"steps": steps, "sums": sums, "parts": len(learner.optimizer.parts)}


def score(case, trainer) -> dict:
    """Scores of a reward model, and how far the gradient of a weighted sum of them is from Hugging Face's."""
    import torch

    from spmd.samples import advantages_of, make_samples
    from spmd_rl.training.learner import LossResult
    from spmd_rl.worker.reward_model_scorer import reading

    shape = trainer.models["policy"].shape
    samples, tickets = make_samples(shape.vocabulary, shape.vision)
    # What the samples of a prompt have in common need not be all of the prompt.
    shared = {ticket.id: max(1, ticket.prompt_tokens - case["own_tokens"]) for ticket in tickets}
    read = [
        dataclasses.replace(t, prompt_tokens=shared[t.id], response_tokens=t.tokens - shared[t.id] + 1) for t in tickets
    ]
    held = {i: reading(i, one.tokens.tolist(), shared[i]) for i, one in samples.items()}
    packs = lay_out(case, trainer, held, read)
    label = shape.labels - 1
    trainer.add("scorer", trainer.built(case["model"], shape, "float32", label))
    found, _ = trainer.forward("scorer", packs)
    scores = {
        sample.id: value
        for packed, values in found
        if trainer.place.reports
        for sample, value in zip(packed.samples, values.tolist(), strict=True)
    }
    factors = advantages_of(samples)

    def weighted(packed, values):
        return LossResult((values * torch.tensor([factors[sample.id] for sample in packed.samples])).sum())

    # The same model as a critic would be: its value head is trained.
    trainer.add("critic", trainer.built(case["model"], shape, "float32", label), weighted)
    critic = trainer.learners["critic"]
    before = {name: tensor.clone() for name, tensor in critic.model.weights().items()}
    trainer.learn("critic", 0, 0.0)
    return {"scores": scores, "gradients": compare(critic, before, case["gradients"])[0]}


def compare(learner, before, expected_file: str) -> tuple[dict[str, float], dict[str, float]]:
    """Measure how far this rank's gradients, and its update, are from Hugging Face's: by name, the largest difference
    relative to the tensor's largest value.

    `expected_file`: Hugging Face's gradients, by name.
    """
    import torch

    from spmd_rl.weights.transfer.boxes import view

    expected = torch.load(expected_file)
    gather_gradients(learner.wrapped)
    gradients = {name: weight.main_grad for name, weight in learner.model.module.named() if weight.requires_grad}
    after = learner.model.weights()
    gradient_gaps: dict[str, float] = {}
    step_gaps: dict[str, float] = {}
    for piece in learner.model.shard.pieces:
        if piece.param not in gradients:
            assert torch.equal(after[piece.param], before[piece.param]), f"{piece.param} is not trained"
            continue
        gradient = expected[piece.tensor]
        step = -LEARNING_RATE * gradient / (gradient.abs() + EPSILON)
        box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
        update = after[piece.param] - before[piece.param]
        for worst, found, wanted in ((gradient_gaps, gradients[piece.param], gradient), (step_gaps, update, step)):
            gap = (view(found, piece.at, piece.shape) - wanted[box]).abs().max() / wanted.abs().max().clamp(min=1e-12)
            worst[piece.tensor] = max(worst.get(piece.tensor, 0.0), float(gap))
    return gradient_gaps, step_gaps


def gather_gradients(wrapped) -> None:
    """Bring the parts of the reduced gradients together, which the distributed optimizer leaves one on each rank."""
    import torch.distributed as dist

    for chunk in wrapped:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                for rank, part in enumerate(bucket.grad_data.chunk(group.size())):
                    if rank != group.rank():
                        part.zero_()
                dist.all_reduce(bucket.grad_data, group=group)
