"""Laws of training: one gradient for every layout, and it is Hugging Face's."""

from types import SimpleNamespace

import pytest
import torch

from spmd.ranks import run_ranks

ALGORITHM = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}
FAMILIES = ("qwen2-tied", "qwen3", "llama")
TEMPERATURE = 0.8
BUDGET = 70
# (tensor, pipeline, sequence parallel), by number of ranks; what they leave of the ranks is data parallel
LAYOUTS = {
    1: [(1, 1, True)],
    2: [(2, 1, True), (2, 1, False), (1, 2, True), (1, 1, True)],
    4: [(4, 1, True), (2, 2, True), (2, 2, False), (2, 1, True), (1, 2, True), (1, 4, True), (1, 1, True)],
}
# (shared prompts, tokens of a micro-batch, other settings of the case), on one rank
PACKINGS = [
    (True, 4096, {}),
    (False, 4096, {}),
    (True, 40, {}),
    (False, 40, {}),
    (True, 4096, {"chunk": 1000, "recompute": True}),
]


def case(directory, tensor=1, pipeline=1, sequence=True, share=True, budget=BUDGET, **others):
    return {
        "model": str(directory),
        "tensor": tensor,
        "pipeline": pipeline,
        "sequence": sequence,
        "share": share,
        "budget": budget,
        "algorithm": ALGORITHM,
        "temperature": TEMPERATURE,
    } | others


def merged(reports: list[dict], index: int) -> SimpleNamespace:
    """One case as rank 0 would see it: sums added up, log-probabilities of all data-parallel ranks together."""
    each = [report["cases"][index] for report in reports]
    sums: dict[str, float] = {}
    for one in each:
        for name, value in one["sums"].items():
            sums[name] = sums.get(name, 0.0) + value
    logprobs = {int(k): v for one in each for k, v in one["logprobs"].items()}
    return SimpleNamespace(sums=sums, logprobs=logprobs, grad_norms=[one["grad_norm"] for one in each], each=each)


@pytest.fixture(scope="module")
def huggingface(tiny_models):
    """What transformers computes for the same samples: log-probabilities, loss and the norm of its gradient."""
    from transformers import AutoModelForCausalLM

    from spmd.samples import advantages_of, make_samples, perturb
    from spmd_rl.algorithms.policy_loss import token_loss
    from spmd_rl.config.config import AlgorithmConfig

    results = {}
    for family in FAMILIES:
        model = AutoModelForCausalLM.from_pretrained(
            tiny_models[family], dtype=torch.float32, attn_implementation="eager"
        )
        samples, tickets = make_samples(model.config.vocab_size)
        total = sum(ticket.response_tokens for ticket in tickets)
        advantages = advantages_of(samples)
        logprobs, entropies = {}, {}
        for name, sample in samples.items():
            logits = model(torch.cat([sample.prompt, sample.response])[None]).logits[0]
            log_p = (logits[len(sample.prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
            logprobs[name] = log_p.gather(1, sample.response[:, None])[:, 0]
            entropies[name] = -(log_p.exp() * log_p).sum(-1)
            sample.policy_logprobs = sample.reference_logprobs = logprobs[name].detach()
        perturb(samples.values())
        loss = sum(
            token_loss(
                logprobs[name],
                sample.policy_logprobs,
                torch.full_like(logprobs[name], advantages[name]).detach(),
                sample.reference_logprobs,
                entropies[name],
                AlgorithmConfig(**ALGORITHM),
            )[0].sum()
            for name, sample in samples.items()
        )
        (loss / total).backward()
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        results[family] = SimpleNamespace(
            logprobs={name: value.tolist() for name, value in logprobs.items()},
            grad_norm=float(norm),
            entropy=float(sum(entropy.sum() for entropy in entropies.values())),
        )
    return results


def check_equal_to_huggingface(found: SimpleNamespace, expected: SimpleNamespace) -> None:
    assert found.logprobs.keys() == expected.logprobs.keys()
    for name, values in expected.logprobs.items():
        assert found.logprobs[name] == pytest.approx(values, abs=1e-4)
    assert found.grad_norms == pytest.approx([expected.grad_norm] * len(found.grad_norms), rel=1e-4)
    assert found.sums["actor/entropy"] == pytest.approx(expected.entropy, rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_layout_has_the_log_probabilities_and_gradient_of_huggingface(ranks, tiny_models, huggingface):
    cases = [case(tiny_models[family], *layout) for family in FAMILIES for layout in LAYOUTS[ranks]]
    reports = run_ranks("spmd.training_ranks", ranks, {"cases": cases})
    losses: dict[str, dict[str, float]] = {}
    for index, one in enumerate(cases):
        family = FAMILIES[index // len(LAYOUTS[ranks])]
        found = merged(reports, index)
        check_equal_to_huggingface(found, huggingface[family])
        assert found.sums["actor/pg_clipfrac"] > 0, "the case is too easy: nothing is clipped"
        first = losses.setdefault(family, found.sums)
        assert found.sums == pytest.approx(first, rel=1e-4), f"{one} against the first layout"


def test_sharing_prompts_and_the_size_of_micro_batches_change_nothing(tiny_models, huggingface):
    cases = [
        case(tiny_models[family], share=share, budget=budget, **others)
        for family in FAMILIES
        for share, budget, others in PACKINGS
    ]
    reports = run_ranks("spmd.training_ranks", 1, {"cases": cases})
    for index in range(len(cases)):
        check_equal_to_huggingface(merged(reports, index), huggingface[FAMILIES[index // len(PACKINGS)]])
    shared, apart, small = (reports[0]["cases"][index] for index in range(3))
    assert shared["tokens"] < 0.7 * apart["tokens"]
    assert small["microbatches"] > shared["microbatches"]


def test_bf16_stays_close_to_fp32_in_every_layout(tiny_models):
    layouts = LAYOUTS[2]
    cases = [case(tiny_models["qwen2-tied"], *layout, dtype="bfloat16") for layout in layouts]
    cases.append(case(tiny_models["qwen2-tied"]))
    reports = run_ranks("spmd.training_ranks", 2, {"cases": cases})
    exact = merged(reports, len(layouts))
    for index in range(len(layouts)):
        found = merged(reports, index)
        assert found.grad_norms == pytest.approx(exact.grad_norms, rel=0.05)
        assert found.sums["actor/entropy"] == pytest.approx(exact.sums["actor/entropy"], rel=0.02)
