"""A rank of tests/spmd/test_blocks.py: how often a model waits for its device, and its experts beside Megatron's."""

from spmd.ranks import arguments, end_megatron, join, ready, report


def main() -> None:
    world = join(ready("megatron_core"))
    asked = arguments()
    found = {"reads": [_reads(case, world) for case in asked["reads"]]}
    found["replays"] = [_replay(case, world) for case in asked.get("replays", ())]
    if world.size == 1:
        found["experts"] = [_experts(skew) for skew in asked["skews"]]
    report(world.rank, found)
    end_megatron()


def _trainer(case: dict, world):
    import torch

    from spmd_rl.config.config import Config, ModelConfig, ParallelConfig, TrainConfig
    from spmd_rl.config.rollout_config import RolloutConfig
    from spmd_rl.models.model_shape import read_model_shape
    from spmd_rl.worker.trainer import Trainer

    config = Config(
        model=ModelConfig(path=case["model"], dtype="float32"),
        parallel=ParallelConfig(**case["parallel"]),
        train=TrainConfig(recompute=case["recompute"], logprob_chunk_tokens=16, clip_grad=1e9),
        rollout=RolloutConfig(router_replay=case.get("replay", False)),
    )
    return Trainer(config, read_model_shape(case["model"]), torch.device("cpu"), world)


def _reads(case: dict, world) -> dict[str, int]:
    """Return what one micro-batch's forward and backward passes wait for, by name."""
    from spmd.samples import make_samples, perturb, put_what_is_learned
    from spmd.training_ranks import lay_out
    from spmd_rl.testing.device_reads import DeviceReads
    from spmd_rl.training.forward import run_passes

    end_megatron()
    trainer = _trainer(case, world)
    learner = trainer.learners["policy"]
    samples, tickets = make_samples(trainer.models["policy"].shape.vocabulary)
    packs = lay_out({"budget": 4096, "share": True}, trainer, samples, tickets)
    trainer.score("policy")
    perturb(samples.values())
    put_what_is_learned(samples)
    learner.gradients.restore()
    learner.optimizer.zero_gradients()
    model, loss = learner.model, trainer.losses["policy"]

    def use(packed, *rows):
        return loss(packed, *rows).total

    with DeviceReads() as reads:
        run_passes(learner.wrapped, model.module.last, model.place, packs[:1], model.head, use, backward=True)
    return dict(reads.counts)


def choices(sample, layers: int, experts: int, k: int):
    """Return experts that no router would choose for a sample's tokens; equal for the prompt that a group shares."""
    import torch

    begin = (sample.tokens[:-1].long()[:, None] * 3 + torch.arange(layers)) % experts  # [L - 1, layers]
    return ((begin[..., None] + torch.arange(k) * 2) % experts).to(torch.int16)


def _replay(case: dict, world) -> dict:
    """Return log-probabilities and the gradient's norm where samples say their tokens' experts, or say nothing."""
    from spmd.samples import make_samples, perturb, put_what_is_learned
    from spmd.training_ranks import lay_out

    end_megatron()
    trainer = _trainer(case, world)
    shape = trainer.models["policy"].shape
    samples, tickets = make_samples(shape.vocabulary)
    if case["says"]:
        for sample in samples.values():
            chosen = choices(sample, shape.layers, shape.experts.count, shape.experts.per_token)
            sample.fields["routed_experts"] = chosen
    packs = lay_out({"budget": 70, "share": case["share"]}, trainer, samples, tickets)
    trainer.score("policy")
    reports = trainer.place.reports
    logprobs = {one.id: one.fields["policy_logprobs"].tolist() for pack in packs for one in pack.samples if reports}
    perturb(samples.values())
    put_what_is_learned(samples)
    learned = trainer.learn("policy", 0, 0.0)
    load = learned.maxima.get("moe/load_imbalance", 0.0)
    return {"logprobs": logprobs, "norm": learned.grad_norm, "packs": len(packs), "load": load}


def _experts(skew: float) -> list[float]:
    """Return how far our layer is from Megatron's, whose experts are modules: output, and each gradient.

    `skew` is added to the first experts' scores: with a large one the others have no tokens.
    """
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from spmd_rl.training.experts import GroupedExperts, dispatch_here

    count, hidden, channels, tokens = 8, 32, 24, 61
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        num_moe_experts=count,
        moe_router_topk=3,
        moe_ffn_hidden_size=channels,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_router_dtype="fp32",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    modules = ModuleSpec(
        SequentialMLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    theirs = MoELayer(config, MoESubmodules(experts=modules), 1, groups)
    ours = dispatch_here(MoELayer(config, MoESubmodules(experts=ModuleSpec(GroupedExperts)), 1, groups))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in ours.parameters():
            weight.normal_(std=0.3, generator=generator)
        ours.router.weight[:3, 0] += skew
        theirs.router.weight.copy_(ours.router.weight)
        for e, expert in enumerate(theirs.experts.local_experts):
            expert.linear_fc1.weight.copy_(ours.experts.linear_fc1.weight[e])
            expert.linear_fc2.weight.copy_(ours.experts.linear_fc2.weight[e])
    x = torch.randn(tokens, 1, hidden, generator=generator)
    x[..., 0] = 1.0
    toward = torch.randn(tokens, 1, hidden, generator=generator)
    found = []
    for layer in (ours, theirs):
        given = x.clone().requires_grad_()
        out, _ = layer(given)
        (out * toward).sum().backward()
        found.append([out.detach(), given.grad, layer.router.weight.grad])
    for name in ("linear_fc1", "linear_fc2"):
        found[0].append(getattr(ours.experts, name).weight.grad)
        each = (getattr(expert, name).weight.grad for expert in theirs.experts.local_experts)
        found[1].append(torch.stack([torch.zeros_like(found[0][-1][0]) if one is None else one for one in each]))
    apart = [float((one - other).abs().max()) for one, other in zip(*found, strict=True)]
    empty = int((found[0][-1].abs().sum((1, 2)) == 0).sum())
    return [empty, *apart]
