"""One rank of tests/spmd/test_training.py: the same samples under many layouts, in one process."""

import dataclasses
import math

from spmd.ranks import arguments, end_megatron, join, ready, report

LEARNING_RATE, EPSILON = 0.1, 1e-2


def main() -> None:
    from spmd_rl.config.config import Config, ModelConfig
    from spmd_rl.models.model_shape import read_model_shape

    platform = ready("megatron_core")
    import torch
    from megatron.core import parallel_state

    from spmd.samples import advantages_of, make_samples, perturb
    from spmd_rl.controller.planner import plan_microbatches
    from spmd_rl.distributed.layout import TrainLayout
    from spmd_rl.training.parallel import start_parallel
    from spmd_rl.training.trainer import Trainer
    from spmd_rl.weights.families import megatron_shard
    from spmd_rl.weights.files.hf_reader import load_shard

    world = join(platform)
    results = []
    for case in arguments()["cases"]:
        shape = read_model_shape(case["model"])
        base = Config(model=ModelConfig(path=case["model"]))
        config = dataclasses.replace(
            base,
            model=dataclasses.replace(base.model, path=case["model"], dtype=case.get("dtype", "float32")),
            parallel=dataclasses.replace(base.parallel, **case["parallel"]),
            algorithm=dataclasses.replace(base.algorithm, **case.get("algorithm", {})),
            train=dataclasses.replace(
                base.train,
                logprob_chunk_tokens=case.get("chunk", 7),
                recompute=case.get("recompute", False),
                # The norm is computed, and the gradients stay as they are.
                clip_grad=1e9,
                # AdamW's first step, as a smooth function of the gradient.
                adam_epsilon=EPSILON,
                weight_decay=0.0,
            ),
            rollout=dataclasses.replace(base.rollout, temperature=case.get("temperature", 0.8)),
        )
        if parallel_state.model_parallel_is_initialized():
            end_megatron()
        layout = TrainLayout.of(config.parallel, world.size)
        place = start_parallel(layout, 1)
        shard = megatron_shard(shape, layout, world.rank)
        trainer = Trainer(
            config,
            shape,
            layout,
            place,
            torch.device("cpu"),
            lambda p, path, shard=shard, shape=shape: load_shard(path, shard, p, shape),
        )
        assert trainer.parameters().keys() == shard.params.keys()
        if "score" in case:
            results.append(score(case, trainer, shard))
            continue
        if "checkpoint" in case:
            results.append(go_on(case, trainer, shard, world))
            continue
        samples, tickets = make_samples(shape.vocabulary)
        advantages = advantages_of(samples)
        total = sum(ticket.response_tokens for ticket in tickets)
        plan = plan_microbatches(tickets, layout.data, 1, case["budget"], case["share"])
        packs = trainer.pack(
            [
                [[samples[i] for i in group] for group in batch]
                for batch in plan.minibatches[0].microbatches[place.data_rank]
            ],
            case["share"],
        )
        trainer.score(packs, "policy")
        if trainer.reference is not None:
            trainer.score(packs, "reference")
        scored = {
            sample.id: sample.policy_logprobs.tolist() for pack in packs for sample in pack.samples if place.reports
        }
        perturb(samples.values())
        before = {name: tensor.clone() for name, tensor in trainer.parameters().items()}
        learned = trainer.learn(packs, advantages, dict.fromkeys(samples, 1.0 / total), LEARNING_RATE)
        # On a CPU nothing moves, and what would is looked up all the same.
        trainer.optimizer.offload()
        trainer.optimizer.onload()
        compared = compare(trainer, shard, before, case["gradients"]) if "gradients" in case else ({}, {})
        results.append(
            {
                "grad_norm": learned.grad_norm,
                "sums": learned.sums,
                "logprobs": scored,
                "microbatches": len(packs),
                "tokens": sum(pack.tokens.shape[1] for pack in packs),
                "gradients": compared[0],
                "steps": compared[1],
                "skipped": skips_what_is_not_finite(trainer, world.rank == world.size - 1),
            }
        )
    report(world.rank, {"cases": results})


def skips_what_is_not_finite(trainer, here: bool) -> bool:
    """Whether this rank's weights and moments stay when a gradient is not finite: of one rank, which is here or not."""
    import torch

    from spmd_rl.training.trainer import first_not_finite

    state = {f"weight {name}": tensor for name, tensor in trainer.parameters().items()}
    state |= {f"{number} {name}": tensor for number, (name, tensor) in enumerate(trainer.optimizer.tensors())}
    before = {name: tensor.clone() for name, tensor in state.items()}
    names = [name for name, _ in trainer.policy.named()]
    skipped = len(before) > len(names)
    for value in (float("nan"), float("inf")):
        if here:
            for parameter in trainer.policy.parameters():
                parameter.main_grad.fill_(value)
        made, norm = trainer.optimizer.step(LEARNING_RATE)
        skipped &= not made and not math.isfinite(norm)
    broken = first_not_finite((name, parameter.main_grad) for name, parameter in trainer.policy.named())
    skipped &= (broken == names[0]) if here else True
    skipped &= trainer.broken() == ""
    skipped &= all(torch.equal(before[name], tensor) for name, tensor in state.items())
    # What would be saved is looked at to the last element, and large values are not taken for infinite ones.
    name, weight = next(reversed(trainer.parameters().items()))
    for value, broken in ((torch.finfo(weight.dtype).max, ""), (math.nan, name), (-math.inf, name)):
        weight.view(-1)[-2:] = value
        skipped &= trainer.broken() == broken
    return skipped


def go_on(case, trainer, shard, world) -> dict:
    """Two steps from a checkpoint, which the case that `begins` makes after a first step and the others take up."""
    from pathlib import Path

    from spmd.samples import advantages_of, make_samples, perturb
    from spmd_rl.controller.planner import plan_microbatches
    from spmd_rl.worker.shard_saver import ShardSaver

    def step(rate: float) -> dict:
        samples, tickets = make_samples(trainer.shape.vocabulary)
        total = sum(ticket.response_tokens for ticket in tickets)
        plan = plan_microbatches(tickets, trainer.layout.data, 1, case["budget"], case["share"])
        mine = plan.minibatches[0].microbatches[trainer.place.data_rank]
        packs = trainer.pack([[[samples[i] for i in group] for group in batch] for batch in mine], case["share"])
        trainer.score(packs, "policy")
        trainer.score(packs, "reference")
        perturb(samples.values())
        learned = trainer.learn(packs, advantages_of(samples), dict.fromkeys(samples, 1.0 / total), rate)
        return {"sums": learned.sums, "grad_norm": learned.grad_norm}

    saving, directory = ShardSaver(trainer, shard, world), Path(case["checkpoint"])
    if case["begins"]:
        step(1e-3)
        saving.begin(directory)
        assert saving.progress(wait=True)["failed"] is None
    else:
        saving.load(directory, only_weights=False)
    return {"steps": [step(1e-3), step(1e-3)]}


def score(case, trainer, shard) -> dict:
    """Scores of a reward model, and how far the gradient of a weighted sum of them is from Hugging Face's."""
    import torch

    from spmd.samples import advantages_of, make_samples
    from spmd_rl.controller.planner import plan_microbatches
    from spmd_rl.training.forward import run_values
    from spmd_rl.training.reward_model import RewardModel, scored_sample
    from spmd_rl.weights.files.hf_reader import load_shard

    samples, tickets = make_samples(trainer.shape.vocabulary)
    # What the samples of a prompt have in common need not be all of the prompt.
    shared = {ticket.id: max(1, ticket.prompt_tokens - case["own_tokens"]) for ticket in tickets}
    plan = plan_microbatches(
        [
            dataclasses.replace(t, prompt_tokens=shared[t.id], response_tokens=t.tokens - shared[t.id] + 1)
            for t in tickets
        ],
        trainer.layout.data,
        1,
        case["budget"],
        case["share"],
    )
    held = {i: scored_sample(i, torch.cat([one.prompt, one.response]), shared[i]) for i, one in samples.items()}
    packs = trainer.pack(
        [
            [[held[i] for i in group] for group in batch]
            for batch in plan.minibatches[0].microbatches[trainer.place.data_rank]
        ],
        case["share"],
    )
    label = trainer.shape.labels - 1
    reward_model = RewardModel(
        case["model"],
        trainer.shape,
        trainer.layout,
        trainer.place,
        trainer.device,
        "float32",
        trainer.config.parallel.sequence,
        label,
        lambda parameters, path: load_shard(path, shard, parameters, trainer.shape),
    )
    scores = reward_model.score(packs)
    factors = advantages_of(samples)

    def weighted(packed, values):
        lasts = torch.tensor(packed.lengths, dtype=torch.long).cumsum(0) - 1
        return (values[lasts, label] * torch.tensor([factors[sample.id] for sample in packed.samples])).sum()

    # The same model as a critic would be: its value head is trained.
    trainer.gradients.restore()
    trainer.optimizer.zero_gradients()
    run_values(trainer.wrapped, trainer.policy, trainer.place, packs, weighted, backward=True)
    return {"scores": scores, "gradients": compare(trainer, shard, trainer.parameters(), case["gradients"])[0]}


def compare(trainer, shard, before, expected_file: str) -> tuple[dict[str, float], dict[str, float]]:
    """How far this rank's gradients, and its update, are from Hugging Face's: by name, the largest difference relative
    to the tensor's largest value.

    `expected_file`: Hugging Face's gradients, by name.
    """
    import torch

    from spmd_rl.weights.transfer.boxes import view

    expected = torch.load(expected_file)
    gather_gradients(trainer.wrapped)
    inside = trainer.policy if len(trainer.policy) > 1 else trainer.policy[0]
    gradients = {name: parameter.main_grad for name, parameter in inside.named_parameters()}
    after = trainer.parameters()
    gradient_gaps: dict[str, float] = {}
    step_gaps: dict[str, float] = {}
    for piece in shard.pieces:
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
