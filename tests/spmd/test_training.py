"""Laws of training: one gradient for every layout, and it is Hugging Face's."""

import itertools
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from spmd.covering import covering
from spmd.ranks import run_ranks
from spmd_rl.models import usual_name
from tiny_models import make_tiny

ALGORITHM = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}
# Behind a family's name: losses and corrections that look at a response as a whole.
METHODS = {
    "": {},
    "gspo": {"loss": "gspo", "correction": "sequence_truncate", "clip_low": 1e-3, "clip_high": 1e-3},
    "rloo": {"loss": "rloo", "correction": "geometric_mask(low=0.2, high=5)", "clip_high": 0.05},
}
TEMPERATURE = 0.8
BUDGET = 70
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 4,
    "beta_slow": 1,
}
SMALL_LATENT = {"kv_lora_rank": 40, "qk_rope_head_dim": 16}
# Besides the models that all tests share.
MODELS = {
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen2_5_vl": ("qwen2_5_vl", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "deepseek_v3": ("deepseek_v3", SMALL_LATENT),
    "deepseek_v3-yarn": (
        "deepseek_v3",
        SMALL_LATENT | {"q_lora_rank": None, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
}
DENSE = ("qwen2-tied", "qwen3", "llama")
FAMILIES = (*DENSE, *MODELS, "qwen2-tied/gspo", "qwen2-tied/rloo")


def method_of(family):
    """Settings of what trains the model of that name: what stands behind its stroke."""
    return ALGORITHM | METHODS[family.partition("/")[2]]


def tp(size, **others):
    return {"tensor": size, **others}


def pp(size, **others):
    return {"pipeline": size, **others}


def ep(size, **others):
    return {"expert": size, **others}


def cp(size, **others):
    return {"context": size, **others}


# By number of ranks: layouts of each model; what they leave of the ranks is data parallel. All of them with --full;
# otherwise as many as have every pair of two settings once.
LAYOUTS = {
    1: {family: [{}] for family in FAMILIES},
    2: {
        "qwen2-tied": [tp(2), pp(2), {}, pp(2, layers_per_stage=(1, 3)), pp(2, virtual=2), cp(2)],
        "qwen2-tied/gspo": [pp(2, virtual=2), {}, cp(2)],
        "qwen2-tied/rloo": [tp(2), cp(2)],
        "qwen3": [tp(2), tp(2, sequence=False), pp(2), cp(2)],
        "qwen2_5_vl": [tp(2), tp(2, sequence=False), pp(2), pp(2, virtual=2), {}, cp(2)],
        "llama": [tp(2), {}, pp(2, virtual=2)],
        "qwen2_moe": [tp(2), tp(2, expert=2), tp(2, expert_tensor=2), {}, cp(2, expert=2)],
        "qwen3_moe": [ep(2), tp(2, expert=2), pp(2, virtual=2)],
        "deepseek_v3": [tp(2), tp(2, expert=2), ep(2), pp(2, layers_per_stage=(1, 3)), pp(2, virtual=2), cp(2)],
        "deepseek_v3-yarn": [tp(2, expert_tensor=2), {}],
    },
    4: {
        "qwen2-tied": [tp(2), pp(4), tp(2, pipeline=2), cp(2, tensor=2), cp(2, pipeline=2)],
        "qwen2-tied/gspo": [cp(2, pipeline=2)],
        "qwen2_5_vl": [tp(2, pipeline=2), cp(2, tensor=2)],
        "qwen3": [tp(4), pp(2, virtual=2), tp(2, pipeline=2, sequence=False), cp(4), cp(2, tensor=2, sequence=False)],
        "llama": [{}, tp(2, pipeline=2, virtual=2, layers_per_stage=(1, 1, 1, 1)), cp(2), cp(2, pipeline=2, virtual=2)],
        "qwen2_moe": [tp(2, pipeline=2), ep(4), tp(2, expert=2), cp(2, expert=4)],
        "qwen3_moe": [
            ep(2, pipeline=2),
            cp(2, expert=2),
            tp(2, expert=2, expert_tensor=2),
            tp(4, expert=2, expert_tensor=2),
        ],
        "deepseek_v3": [
            tp(2, expert=2, pipeline=2),
            tp(2, expert=4),
            ep(2, pipeline=2, virtual=2),
            tp(2, expert=2, expert_tensor=2),
            cp(2, tensor=2, expert=2, expert_tensor=2),
        ],
        "deepseek_v3-yarn": [tp(2, expert=2), ep(2, pipeline=2, layers_per_stage=(3, 1)), cp(2, expert=2)],
    },
}
# (shared prompts, tokens of a micro-batch, other settings of the case), on context ranks
PACKINGS = [
    (True, 4096, {}),
    (False, 4096, {}),
    (True, 40, {}),
    (False, 40, {"recompute": "selective"}),
    (True, 40, {"recompute": "selective", "recompute_modules": ["core_attn", "mlp", "moe"]}),
    (True, 4096, {"chunk": 1000, "recompute": "full"}),
    (True, 4096, {"recompute": "full", "recompute_layers": 1}),
]
PACKED = {
    1: ("qwen2-tied", "qwen2-tied/gspo", "qwen3", "qwen2_5_vl", "qwen2_moe", "deepseek_v3", "deepseek_v3-yarn"),
    2: ("qwen2-tied", "qwen2-tied/gspo", "deepseek_v3"),
}
# Two ranks, in bf16 and in fp32; those after them with --full.
SHORT = [("qwen2-tied", tp(2)), ("qwen2-tied", pp(2)), ("deepseek_v3", tp(2, expert=2)), ("deepseek_v3", cp(2))]
SHORT_TOO = [(family, layout) for family in ("qwen2-tied", "deepseek_v3") for layout in LAYOUTS[2][family]]

# Models whose experts are balanced, by number of ranks: layouts, tokens of a micro-batch, other settings of the case.
BALANCE = 0.5
BALANCED = {
    1: [("qwen3_moe", {}, 4096, {}), ("qwen3_moe", {}, 40, {}), ("deepseek_v3", {}, 4096, {"recompute": "full"})],
    2: [("qwen3_moe", tp(2, expert=2), 4096, {}), ("qwen3_moe", pp(2, virtual=2), 40, {}), ("qwen3_moe", ep(2), 40, {})]
    + [("deepseek_v3", cp(2, expert=2), 4096, {"recompute": "full"}), ("qwen3_moe", ep(2), 4096, {})],
}

FREEZES = (["vision", "projector"], ["vision"])
"""Parts of a model that sees which are not trained."""
SUMS = ("actor/pg_loss", "actor/kl_loss", "actor/entropy")
TOGETHER, SMALL, ALONE, APART = (True, 4096), (True, 40), (False, 1), (False, 4096)
# Models that score, by number of ranks: family, layout, (shared prompts, tokens of a micro-batch), tokens at a prompt's
# end that its samples don't share.
SCORERS = ("llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
SCORING = {
    1: [*((family, {}, TOGETHER, 0) for family in SCORERS)]
    + [("qwen2", {}, SMALL, 2), ("qwen2", {}, ALONE, 0), ("qwen2", {}, APART, 3)],
    2: [
        ("llama", tp(2), TOGETHER, 0),
        ("llama", pp(2, layers_per_stage=(3, 1)), SMALL, 1),
        ("qwen2", tp(2, sequence=False), SMALL, 0),
        ("qwen2", {}, ALONE, 0),
        ("qwen2", pp(2, virtual=2), TOGETHER, 2),
        ("qwen3", cp(2), TOGETHER, 1),
        ("qwen3", tp(2), ALONE, 0),
        ("qwen2_moe", tp(2, expert=2), SMALL, 0),
        ("qwen3_moe", ep(2), APART, 0),
        ("qwen3_moe", pp(2), TOGETHER, 0),
    ],
    4: [
        ("llama", tp(2, pipeline=2), SMALL, 0),
        ("qwen2", {}, TOGETHER, 5),
        ("qwen3", cp(2, tensor=2), TOGETHER, 0),
        ("qwen2_moe", tp(2, expert=4), APART, 0),
    ],
}


# By number of ranks: from a checkpoint of the first layout to the others.
GOES_ON = {
    1: {},
    2: {
        "llama": [tp(2), pp(2), {}, cp(2)],
        "qwen2_5_vl": [tp(2), pp(2), {}],
        "qwen3_moe": [ep(2), pp(2), tp(2, expert=2)],
    },
    4: {"qwen2_moe": [{}, tp(2, expert=4), ep(2, pipeline=2)]},
}
GOES_ON_TOO = {1: {}, 2: {}, 4: {"llama": [tp(2, pipeline=2), {}, tp(2), pp(4)]}}
"""With --full."""


def case(directory, layout=None, share=True, budget=BUDGET, **others):
    return {
        "model": str(directory),
        "parallel": layout or {},
        "share": share,
        "budget": budget,
        "algorithm": ALGORITHM,
        "temperature": TEMPERATURE,
    } | others


def _of(huggingface, family):
    return {"gradients": huggingface[family].file, "algorithm": method_of(family), "limits": "/" in family}


@pytest.fixture(scope="module")
def models(tiny_models, tmp_path_factory):
    """Name -> directory of a tiny random model."""
    root = tmp_path_factory.mktemp("sparse")
    made = {name: str(make_tiny(root / name, family, **others)) for name, (family, others) in MODELS.items()}
    found = tiny_models | made
    return found | {family: found[family.partition("/")[0]] for family in FAMILIES}


def merged(each: list[dict]) -> SimpleNamespace:
    """One case as rank 0 would see it: sums added up, log-probabilities of all data-parallel ranks together."""
    sums: dict[str, float] = {}
    for one in each:
        for name, value in one["sums"].items():
            sums[name] = sums.get(name, 0.0) + value
    logprobs = {int(k): v for one in each for k, v in one["logprobs"].items()}
    gaps: dict[str, dict[str, float]] = {"gradients": {}, "steps": {}}
    for one in each:
        for kind, worst in gaps.items():
            for name, gap in one[kind].items():
                worst[name] = max(worst.get(name, 0.0), gap)
    norms = [one["grad_norm"] for one in each]
    return SimpleNamespace(
        sums=sums, logprobs=logprobs, grad_norms=norms, gradient_gaps=gaps["gradients"], step_gaps=gaps["steps"]
    )


def by_published_name(name: str, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """A gradient by the names that are saved: transformers computes with all experts of a layer in one tensor."""
    name = usual_name(name)
    stem, _, kind = name.rpartition(".")
    if not stem.endswith("mlp.experts"):
        return {name: gradient}
    if kind == "down_proj":
        return {f"{stem}.{e}.down_proj.weight": part for e, part in enumerate(gradient)}
    assert kind == "gate_up_proj"
    halves = {"gate_proj": gradient.chunk(2, 1)[0], "up_proj": gradient.chunk(2, 1)[1]}
    return {f"{stem}.{e}.{half}.weight": part for half, all_of in halves.items() for e, part in enumerate(all_of)}


def seen(sample) -> dict[str, torch.Tensor]:
    """Return what transformers' model takes beside a sample's tokens: its images."""
    if "pixel_values" not in sample.fields:
        return {}
    types = torch.zeros(1, len(sample.tokens), dtype=torch.int)
    types[0, sample.fields["image_places"]] = 1
    images = {"pixel_values": sample.fields["pixel_values"], "image_grid_thw": sample.fields["image_grids"]}
    return images | {"mm_token_type_ids": types}


def loss_of(family, sample, logprobs, entropy, advantage):
    """Sum of one sample's losses, as the method of `family` has it."""
    from spmd_rl.algorithms.table import find_correction, find_loss
    from spmd_rl.config.config import AlgorithmConfig

    algorithm = AlgorithmConfig(**method_of(family))
    before, reference, rollout = (
        sample.fields[f"{name}_logprobs"][sample.loss_mask] for name in ("policy", "reference", "rollout")
    )
    lengths = [len(before)]
    weights, _ = find_correction(algorithm)(before, rollout, lengths)
    loss, _ = find_loss(algorithm)(
        logprobs[sample.loss_mask],
        before,
        advantage * weights,
        reference,
        entropy[sample.loss_mask],
        lengths=lengths,
    )
    return loss.sum()


def kl_of(sample):
    """Sum of a sample's k3 estimates, by the formula."""
    d = (sample.fields["reference_logprobs"] - sample.fields["policy_logprobs"])[sample.loss_mask]
    return float((d.exp() - 1 - d).sum())


@pytest.fixture(scope="module")
def huggingface(models, tmp_path_factory):
    """Return what transformers computes for the same samples: log-probabilities, loss, gradient and its norm."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from spmd.samples import advantages_of, make_samples, perturb
    from spmd_rl.models.model_shape import read_model_shape

    results = {}
    for family in FAMILIES:
        sees = family == "qwen2_5_vl"
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model = kind.from_pretrained(models[family], dtype=torch.float32, attn_implementation="eager")
        shape = read_model_shape(models[family])
        samples, tickets = make_samples(shape.vocabulary, shape.vision)
        total = sum(ticket.loss_tokens for ticket in tickets)
        advantages = advantages_of(samples)
        logprobs, entropies = {}, {}
        for name, sample in samples.items():
            logits = model(sample.tokens[None], **seen(sample)).logits[0]
            log_p = (logits[len(sample.prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
            logprobs[name] = log_p.gather(1, sample.response[:, None])[:, 0]
            entropies[name] = -(log_p.exp() * log_p).sum(-1)
            sample.fields |= dict.fromkeys(("policy_logprobs", "reference_logprobs"), logprobs[name].detach())
        perturb(samples.values())
        loss = sum(
            loss_of(family, sample, logprobs[name], entropies[name], advantages[name])
            for name, sample in samples.items()
        )
        (loss / total).backward()
        gradients = {}
        for name, parameter in model.named_parameters():
            gradients |= by_published_name(name, parameter.grad)
        file = tmp_path_factory.mktemp("gradients") / "gradients.pt"
        torch.save({name: gradient.clone() for name, gradient in gradients.items()}, file)
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        results[family] = SimpleNamespace(
            kl={name: kl_of(sample) for name, sample in samples.items()},
            logprobs={name: (value * samples[name].loss_mask).tolist() for name, value in logprobs.items()},
            grad_norm=float(norm),
            gradients=gradients.keys(),
            file=str(file),
            entropy=float(sum(entropy.detach()[samples[name].loss_mask].sum() for name, entropy in entropies.items())),
        )
    return results


def balance_of(gates, top, samples, tickets, data, budget):
    """Return the balancing loss of a mini-batch by its formula, and how many layers have one.

    `gates`: by sample, of each layer the gate and its input [L, H]. `top`: experts of a token.
    """
    from spmd_rl.controller.planner import plan_microbatches

    planned = plan_microbatches(tickets, data, 1, budget, True).minibatches[0].microbatches
    laid = [groups for batches in planned for groups in batches if any(groups)]
    losses, layers = [], len(gates[0])
    for layer, groups in itertools.product(range(layers), laid):
        gate, seen = gates[0][layer][0], []
        for group in filter(None, groups):
            prompt = len(samples[group[0]].prompt)
            seen.append(gates[group[0]][layer][1][:prompt])
            seen += [gates[sample][layer][1][prompt:-1] for sample in group]
        logits = torch.cat(seen) @ gate.weight.T
        sigmoid = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        scores = sigmoid if hasattr(gate, "e_score_correction_bias") else logits.softmax(-1)
        chosen = torch.zeros_like(scores).scatter(1, scores.topk(top, -1).indices, 1.0)
        losses.append((len(scores), scores.shape[1] * (chosen.mean(0) / top * scores.mean(0)).sum()))
    tokens = sum(tokens for tokens, _ in losses) / layers
    return sum(tokens * loss for tokens, loss in losses) / tokens, layers


@pytest.fixture(scope="module")
def balanced(models, huggingface, tmp_path_factory):
    """Return a function of (family, data-parallel ranks, tokens of a micro-batch).

    It returns the file of the gradient with BALANCE times that loss, and the loss of a layer.
    """
    from transformers import AutoModelForCausalLM

    from spmd.samples import make_samples

    @cache
    def made(family, data, budget):
        model = AutoModelForCausalLM.from_pretrained(models[family], dtype=torch.float32, attn_implementation="eager")
        samples, tickets = make_samples(model.config.vocab_size)
        gates, seen = {}, []
        for module in [module for name, module in model.named_modules() if name.endswith("mlp.gate")]:
            module.register_forward_pre_hook(lambda gate, given: seen.append((gate, given[0].flatten(0, -2))))
        for name, sample in samples.items():
            seen.clear()
            model(sample.tokens[None])
            gates[name] = list(seen)
        loss, layers = balance_of(gates, model.config.num_experts_per_tok, samples, tickets, data, budget)
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients, found = torch.autograd.grad(BALANCE * loss, parameters, allow_unused=True), {}
        for name, gradient in zip(names, gradients, strict=True):
            found |= by_published_name(name, gradient) if gradient is not None else {}
        file = tmp_path_factory.mktemp("balanced") / "gradients.pt"
        usual = torch.load(huggingface[family].file)
        torch.save({name: gradient + found.get(name, 0.0) for name, gradient in usual.items()}, file)
        return str(file), float(loss.detach()) / layers

    return made


@pytest.fixture(scope="module")
def scorers(tmp_path_factory):
    """Tiny models that score, and what transformers says of the samples of all tests: scores, and their gradient."""
    from transformers import AutoModelForSequenceClassification

    from spmd.samples import advantages_of, make_samples

    root, made = tmp_path_factory.mktemp("scorers"), {}
    for family in SCORERS:
        path = str(make_tiny(root / family, family, value_head=True, labels=2 if family == "qwen2" else 1))
        model = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        samples, _ = make_samples(model.config.vocab_size)
        scores = {name: model(sample.tokens[None]).logits[0, -1] for name, sample in samples.items()}
        factors = advantages_of(samples)
        sum(factors[name] * score for name, score in scores.items()).backward()
        gradients = {}
        for name, parameter in model.named_parameters():
            gradients |= by_published_name(name, parameter.grad)
        torch.save({name: gradient.clone() for name, gradient in gradients.items()}, root / f"{family}.pt")
        made[family] = SimpleNamespace(
            path=path,
            scores={name: float(score.detach()) for name, score in scores.items()},
            gradients=gradients.keys(),
            file=str(root / f"{family}.pt"),
        )
    return made


def check_equal_to_huggingface(found: SimpleNamespace, expected: SimpleNamespace, what: str) -> None:
    assert found.logprobs.keys() == expected.logprobs.keys()
    for name, values in expected.logprobs.items():
        assert found.logprobs[name] == pytest.approx(values, abs=1e-4), what
    assert found.grad_norms == pytest.approx([expected.grad_norm] * len(found.grad_norms), rel=1e-4), what
    assert found.sums["actor/entropy"] == pytest.approx(expected.entropy, rel=1e-4), what
    for gaps, most in ((found.gradient_gaps, 1e-4), (found.step_gaps, 5e-4)):
        assert gaps.keys() == expected.gradients, what
        assert max(gaps.values()) < most, sorted(gaps.items(), key=lambda item: -item[1])[:9] + [what]


def data_ranks(ranks: int, layout: dict) -> int:
    """Return how many data-parallel ranks a layout leaves."""
    return ranks // (layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("context", 1))


@dataclass
class Case:
    """Hold what the ranks of a start are asked, and what each of them says."""

    kind: str
    family: str
    what: tuple
    asked: dict
    each: list[dict]

    def __str__(self) -> str:
        return f"{self.kind} {self.family} {self.what}"


def settings(family: str, layout: dict, *more) -> dict:
    """Return what a case sets, by name, for a choice of cases in which every pair of settings occurs."""
    model, _, method = family.partition("/")
    usual = dict.fromkeys(("tensor", "pipeline", "context", "expert", "expert_tensor", "virtual"), 1)
    others = {f"more {number}": str(one) for number, one in enumerate(more)}
    found = {"family": model, "method": method, "sequence": True, **usual, **layout, **others}
    return found | {"layers_per_stage": "layers_per_stage" in layout}


def some(named: list[tuple], full: bool) -> list[tuple]:
    """Return (ranks, family, layout, ...) of all, or of as many as have every pair of settings; few ranks rather."""
    if full:
        return named
    chosen = covering([settings(*one) for _, *one in named], [ranks**0.5 for ranks, *_ in named])
    return [named[number] for number in chosen]


@pytest.fixture(scope="module")
def start(request, models, huggingface, balanced, scorers, tmp_path_factory):
    """Return a function of how many ranks: all their cases, in one start."""
    full = request.config.getoption("full")
    every = [(n, family, one) for n, families in LAYOUTS.items() for family, them in families.items() for one in them]
    layouts = some(every, full)
    scoring = some([(n, *one) for n, them in SCORING.items() for one in them], full)
    packings = [(1, PACKED[1][0], cp(1), *packing) for packing in PACKINGS]
    packings += some(
        [(n, f, cp(n), *p) for n, them in PACKED.items() for f in them for p in PACKINGS][len(PACKINGS) :], full
    )
    short = SHORT_TOO if full else SHORT

    def cases(ranks: int) -> list[Case]:
        found = []

        def ask(kind: str, family: str, what: tuple, *words, **others) -> None:
            found.append(Case(kind, family, what, case(*words, **others), []))

        for n, family, layout in layouts:
            if n == ranks:
                ask("layout", family, (layout,), models[family], layout, **_of(huggingface, family))
        for n, family, layout, packing, own in scoring:
            if n == ranks:
                more = {"gradients": scorers[family].file, "score": True, "own_tokens": own}
                ask("score", family, (layout, packing, own), scorers[family].path, layout, *packing, **more)
        for n, family, layout, share, budget, others in packings:
            if n == ranks:
                more = _of(huggingface, family) | others
                ask("packing", family, (share, budget, others), models[family], layout, share, budget, **more)
        for family, layout, budget, others in BALANCED.get(ranks, ()):
            file, _ = balanced(family, data_ranks(ranks, layout), budget)
            more = _of(huggingface, family) | {"gradients": file, "balance": BALANCE} | others
            ask("balanced", family, (layout, budget), models[family], layout, True, budget, **more)
        for freeze in FREEZES if ranks < 4 else ():
            ask(
                "frozen", "qwen2_5_vl", (freeze,), models["qwen2_5_vl"], freeze=freeze, **_of(huggingface, "qwen2_5_vl")
            )
        for dtype in ("bfloat16", "float32"):
            for family, layout in short if ranks == 2 else ():
                ask(dtype, family, (layout,), models[family], layout, dtype=dtype)
        for family, layouts_of in (GOES_ON[ranks] | (GOES_ON_TOO[ranks] if full else {})).items():
            saved = str(tmp_path_factory.mktemp("saved"))
            for one in layouts_of:
                more = {"freeze": FREEZES[0]} if family == "qwen2_5_vl" else {}
                ask(
                    "goes on",
                    family,
                    (one,),
                    models[family],
                    one,
                    checkpoint=saved,
                    begins=one is layouts_of[0],
                    **more,
                )
        reports = run_ranks("spmd.training_ranks", ranks, {"cases": [one.asked for one in found]})
        for one, *each in zip(found, *(report["cases"] for report in reports), strict=True):
            one.each = each
        return found

    return cache(cases)


def of_kind(cases: list[Case], kind: str) -> list[Case]:
    return [one for one in cases if one.kind == kind]


RANKS = pytest.mark.parametrize("ranks", [1, 2, 4])


@RANKS
def test_every_layout_has_the_log_probabilities_and_gradient_of_huggingface(start, ranks, huggingface):
    losses: dict[str, dict[str, float]] = {}
    for one in of_kind(start(ranks), "layout"):
        found = merged(one.each)
        check_equal_to_huggingface(found, huggingface[one.family], str(one))
        assert found.sums["actor/pg_clipfrac"] > 0, f"{one}: the case is too easy: nothing is clipped"
        first = losses.setdefault(one.family, found.sums)
        assert found.sums == pytest.approx(first, rel=1e-4), f"{one} against the first layout"


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_frozen_keeps_its_bits_and_the_rest_has_the_gradient_of_huggingface(start, ranks, huggingface):
    cases = of_kind(start(ranks), "frozen")
    assert len(cases) == len(FREEZES)
    for one in cases:  # that the others stay is seen where the weights are
        projects = "visual.merger." if one.asked["freeze"] == ["vision"] else "none of them"
        trained = {
            name
            for name in huggingface[one.family].gradients
            if not name.startswith("visual.") or name.startswith(projects)
        }
        found = merged(one.each)
        assert found.gradient_gaps.keys() == trained, str(one)
        assert max(found.gradient_gaps.values()) < 1e-4, str(one)
        assert [rank["skipped"] for rank in one.each] == [True] * ranks


@RANKS
def test_no_layout_takes_a_step_on_a_gradient_that_is_not_finite(start, ranks):
    for one in of_kind(start(ranks), "layout") + of_kind(start(ranks), "bfloat16"):
        assert [found["skipped"] for found in one.each] == [True] * ranks, str(one)


@RANKS
def test_every_layout_skips_an_update_beyond_a_bound_and_names_the_samples_with_large_losses(start, ranks, huggingface):
    for one in of_kind(start(ranks), "layout"):
        if not one.asked["limits"]:
            continue
        kept = [found["limits"] for found in one.each]
        assert all(found["same"] for found in kept), str(one)
        for asked, knob in enumerate(("grad_norm", "kl", "grad_norm")):
            said = [found["said"][asked] for found in kept]
            assert {updated for updated, _, _ in said} == {False} and len({beyond for _, beyond, _ in said}) == 1
            assert f"train.{knob}_bound = 1e-06" in said[0][1]
            assert {sample for _, _, suspects in said for sample, _ in suspects} == set(range(12))
        *others, last = [found["alone"] for found in kept]
        assert last == [False, True, [f"on rank {ranks - 1} actor/pg_loss"]], f"{one}: a loss that errs on one rank"
        assert others == [[False, True, []]] * (ranks - 1), f"{one}: its update is skipped on all"
        kl = {sample: value for found in kept for sample, value in found["kl"]}
        assert kl == pytest.approx(huggingface[one.family].kl, abs=1e-4), str(one)


@RANKS
def test_every_layout_has_the_scores_of_huggingface_and_their_gradient(start, ranks, scorers):
    for one in of_kind(start(ranks), "score"):
        scores = {int(sample): score for found in one.each for sample, score in found["scores"].items()}
        assert scores == pytest.approx(scorers[one.family].scores, abs=1e-4), str(one)
        gaps: dict[str, float] = {}
        for found in one.each:
            for name, gap in found["gradients"].items():
                gaps[name] = max(gaps.get(name, 0.0), gap)
        assert gaps.keys() == scorers[one.family].gradients, str(one)
        assert max(gaps.values()) < 1e-4, sorted(gaps.items(), key=lambda item: -item[1])[:9] + [str(one)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_are_balanced_by_megatrons_loss_alike_in_every_layout(start, ranks, huggingface, balanced):
    cases = of_kind(start(ranks), "balanced")
    assert len(cases) == len(BALANCED[ranks])
    for one in cases:
        found, (layout, budget) = merged(one.each), one.what
        _, loss = balanced(one.family, data_ranks(ranks, layout), budget)
        assert found.sums["actor/load_balancing_loss"] == pytest.approx(loss, rel=1e-4), str(one)
        assert found.grad_norms[0] != pytest.approx(huggingface[one.family].grad_norm, rel=1e-3), str(one)
        assert max(found.gradient_gaps.values()) < 1e-4, sorted(found.gradient_gaps.items(), key=lambda i: -i[1])[:9]
    off = of_kind(start(ranks), "layout")
    assert all("actor/load_balancing_loss" not in merged(one.each).sums for one in off)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_checkpoint_of_one_layout_goes_on_in_another_with_the_same_loss(start, ranks):
    families: dict[str, list[Case]] = {}
    for one in of_kind(start(ranks), "goes on"):
        families.setdefault(one.family, []).append(one)
    assert families
    for cases in families.values():
        found = [
            [
                {name: sum(rank["steps"][step]["sums"].get(name, 0.0) for rank in one.each) for name in SUMS}
                for step in (0, 1)
            ]
            for one in cases
        ]
        assert abs(found[0][0]["actor/kl_loss"] - found[0][1]["actor/kl_loss"]) > 1e-3, "the steps are too small"
        for one, steps in zip(cases[1:], found[1:], strict=True):
            # The second also depends on the optimizer's state: both moments, and its count of steps.
            for step in (0, 1):
                gaps = {name: abs(steps[step][name] - found[0][step][name]) for name in SUMS}
                print(f"{cases[0]} -> {one.what}, step {step + 1}: {gaps}")
                assert max(gaps["actor/pg_loss"], gaps["actor/kl_loss"]) < 1e-5, f"{one} {gaps}"
                assert steps[step]["actor/entropy"] == pytest.approx(found[0][step]["actor/entropy"], rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_sharing_prompts_and_the_size_of_micro_batches_change_nothing(start, ranks, huggingface):
    cases = of_kind(start(ranks), "packing")
    assert len(cases) > 2
    for one in cases:
        check_equal_to_huggingface(merged(one.each), huggingface[one.family], str(one))
    if ranks == 1:
        shared, apart, small = (one.each[0] for one in cases[:3])
        assert shared["tokens"] < 0.7 * apart["tokens"]
        assert small["microbatches"] > shared["microbatches"]


def test_bf16_stays_close_to_fp32_in_every_layout(start):
    for one, other in zip(of_kind(start(2), "bfloat16"), of_kind(start(2), "float32"), strict=True):
        found, exact = merged(one.each), merged(other.each)
        assert one.what == other.what
        assert found.grad_norms == pytest.approx(exact.grad_norms, rel=0.05), str(one)
        assert found.sums["actor/entropy"] == pytest.approx(exact.sums["actor/entropy"], rel=0.02), str(one)
