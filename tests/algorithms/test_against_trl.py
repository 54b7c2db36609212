"""The losses, advantages and corrections against TRL's trainers: the same samples, rewards and log-probabilities.

TRL's own code goes all the way from rewards to the loss; only its constructor, its generation and its forward pass are
left out, which are given what they would have found.
"""

import random
import re
import warnings
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from spmd_rl.algorithms.kl import sample_kl
from spmd_rl.algorithms.table import find_advantage, find_correction, find_loss, find_reduction
from spmd_rl.config.config import AlgorithmConfig

PROMPTS, SAMPLES, LONGEST = 3, 4, 11
TRL_EPSILON = 1e-4
"""What TRL adds to a standard deviation."""


@pytest.fixture(scope="module")
def trl():
    with warnings.catch_warnings():  # on the vLLM beside it, which it isn't asked for here
        warnings.simplefilter("ignore")
        pytest.importorskip("trl", reason="TRL is not installed: pip install --no-deps trl==1.16.0")
        from trl.trainer.grpo_trainer import GRPOTrainer
        from trl.trainer.rloo_trainer import RLOOTrainer
    return SimpleNamespace(GRPOTrainer=GRPOTrainer, RLOOTrainer=RLOOTrainer)


@pytest.fixture(params=[torch.float64, torch.float32], ids=["float64", "float32"])
def batch(request):
    """Twelve samples of 1 to 11 tokens, some of them masked, one group uniform; all in one precision."""
    torch.set_default_dtype(request.param)
    draw = random.Random(7)
    lengths = [draw.randint(1, LONGEST) for _ in range(PROMPTS * SAMPLES)]
    lengths[0] = LONGEST
    columns: dict[str, list] = defaultdict(list)
    for length in lengths:
        now = [draw.uniform(-4, -0.1) for _ in range(length)]
        columns["new"].append(now)
        # Most tokens are near; some are far enough to be clipped, or masked.
        columns["old"].append([value + draw.gauss(0, 0.3) for value in now])
        columns["reference"].append([value + draw.gauss(0, 0.5) for value in now])
        columns["rollout"].append([value + draw.gauss(0, 0.4) for value in columns["old"][-1]])
        columns["mask"].append([int(position == 0 or draw.random() > 0.2) for position in range(length)])
    rewards = [round(draw.uniform(-1, 2), 2) for _ in lengths]
    rewards[4:8] = [0.5] * 4
    yield SimpleNamespace(
        **columns, lengths=lengths, rewards=rewards, groups=[i // SAMPLES for i in range(len(lengths))]
    )
    torch.set_default_dtype(torch.float32)


class One:
    """Stands for accelerate, in a world of one process."""

    device, process_index, num_processes, sync_gradients = torch.device("cpu"), 0, 1, True

    @staticmethod
    def gather(tensor):
        return tensor

    @staticmethod
    def reduce(tensor, reduction="sum"):
        return tensor


def padded(rows):
    return torch.tensor([[*row, *[0.0] * (LONGEST - len(row))] for row in rows])


def computed_by_trl(trainer_class, batch, masked=True, **settings):
    """Return TRL's loss, its gradient at every token of ours, and its advantages."""
    trainer = object.__new__(trainer_class)
    new = padded(batch.new).requires_grad_()
    model = SimpleNamespace(training=True, is_gradient_checkpointing=False)
    masks = batch.mask if masked else None

    def forward(asked, *arguments, **others):
        old = {id(model): padded(batch.old), id(trainer.ref_model): padded(batch.reference)}
        found = new if torch.is_grad_enabled() else old[id(asked)]
        return found, torch.zeros_like(found), None

    def generate(prompts):
        ids = [[1] * length for length in batch.lengths]
        if trainer_class.__name__ == "RLOOTrainer":
            return [[1]] * len(ids), ids, [""] * len(ids)
        return [[1]] * len(ids), ids, masks, [""] * len(ids), batch.rollout, None, None, None

    given = dict(
        accelerator=One,
        model=model,
        ref_model=SimpleNamespace(),
        _get_per_token_logps_and_entropies=forward,
        _generate=generate,
        _calculate_rewards=lambda *_: torch.tensor(batch.rewards)[:, None],
        _tokenizer=SimpleNamespace(pad_token_id=0),
        args=SimpleNamespace(
            per_device_train_batch_size=99,
            gradient_checkpointing_kwargs=None,
            steps_per_generation=1,
            gradient_accumulation_steps=3,  # not a multiple of steps_per_generation x num_iterations
            delta=settings.get("delta"),
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.0,
        ),
        num_iterations=2,
        num_generations=SAMPLES,
        current_gradient_accumulation_steps=1,
        reward_weights=torch.ones(1),
        reward_func_names=["rule"],
        reward_funcs=[None],
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards="group",
        normalize_advantages=False,
        reward_clip_range=None,
        loss_type="grpo",
        importance_sampling_level="token",
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.0,
        max_completion_length=LONGEST,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_min=None,
        vllm_importance_sampling_clip_max=None,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        _metrics={"train": defaultdict(list)},
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
    )
    absent = ("aux_loss_enabled", "environments", "environment_factories", "tools", "mask_truncated_completions")
    given |= dict.fromkeys((*absent, "pad_to_multiple_of", "_entropy_bonus_enabled", "processing_class"))
    for name, value in (given | settings).items():
        setattr(trainer, name, value)
    found = trainer._generate_and_score_completions([{"prompt": ""} for _ in batch.lengths])
    loss = trainer._compute_loss(model, found)
    (gradient,) = torch.autograd.grad(loss, new)
    rows = zip(gradient, batch.lengths, strict=True)
    return loss.detach(), torch.cat([row[:length] for row, length in rows]), found["advantages"]


def computed_by_us(batch, masked=True, **settings):
    """Return our loss, its gradient at every token, and our advantages, by the functions that a run calls."""
    algorithm = AlgorithmConfig(std_epsilon=TRL_EPSILON, **{"correction": "off"} | settings)
    masks = [mask if masked else [1] * len(mask) for mask in batch.mask]
    tokens = [sum(mask) for mask in masks]
    rewards = batch.rewards
    taught = torch.tensor([bool(one) for mask in masks for one in mask])
    fields = {
        name: torch.tensor([value for row in getattr(batch, name) for value in row])
        for name in ("new", "old", "reference", "rollout")
    }
    new = fields["new"].requires_grad_()
    now, old, reference, rollout = (fields[name][taught] for name in ("new", "old", "reference", "rollout"))
    if algorithm.kl_in_reward:
        paid = algorithm.kl_coefficient * sample_kl(old, reference, tokens, algorithm.kl_estimator)
        rewards = [reward - price for reward, price in zip(rewards, paid.tolist(), strict=True)]
    advantages = torch.tensor(find_advantage(algorithm)(batch.groups, rewards, tokens=tokens))
    weights = torch.tensor(find_reduction(algorithm, LONGEST)(tokens))
    spread = torch.tensor(tokens)
    correct, _ = find_correction(algorithm)(old, rollout, tokens)
    loss, parts = find_loss(algorithm)(
        now,
        old,
        correct * advantages.repeat_interleave(spread),
        reference if algorithm.kl_coefficient else None,
        None,
        **({} if algorithm.loss not in ("gspo", "rloo") else {"lengths": tokens}),
    )
    total = (weights.repeat_interleave(spread) * loss).sum()
    (gradient,) = torch.autograd.grad(total, new)
    return total.detach(), gradient, advantages, parts["clipped"]


# Our settings, and TRL's.
GRPO = {
    "grpo": (dict(loss_reduction="sequence_mean"), dict()),
    "grpo with a divergence": (dict(loss_reduction="sequence_mean", kl_coefficient=0.3), dict(beta=0.3)),
    "dr_grpo": (
        dict(advantage="dr_grpo", loss_reduction="fixed_length"),
        dict(loss_type="dr_grpo", scale_rewards="none"),
    ),
    "dapo": (dict(clip_high=0.28), dict(loss_type="dapo", epsilon_high=0.28)),
    "bnpo": (dict(clip_low=0.1, clip_high=0.1), dict(loss_type="bnpo", epsilon_low=0.1, epsilon_high=0.1)),
    "cispo": (
        dict(loss="cispo", clip_low=1.0, clip_high=0.3),
        dict(loss_type="cispo", epsilon_high=1.3),
    ),
    "gspo": (
        dict(loss="gspo", loss_reduction="sequence_mean", clip_low=0.03, clip_high=0.04),
        dict(importance_sampling_level="sequence", epsilon_low=0.03, epsilon_high=0.04),
    ),
    "gspo with a divergence": (
        dict(loss="gspo", loss_reduction="sequence_mean", kl_coefficient=0.1, kl_estimator="low_var_kl", clip_low=0.03),
        dict(importance_sampling_level="sequence", beta=0.1, epsilon_low=0.03),
    ),
    "dual clip": (
        dict(loss="dual_clip", clip_dual=1.4, loss_reduction="sequence_mean"),
        dict(delta=1.4),
    ),
}
# Our correction, TRL's mode, and its least and largest weight.
CORRECTIONS = {
    "token_truncate(bound=1.3)": ("token_truncate", None, 1.3),
    "sequence_truncate(bound=1.5)": ("sequence_truncate", None, 1.5),
    "token_mask(low=0.6, high=1.4)": ("token_mask", 0.6, 1.4),
    "sequence_mask(high=1.5)": ("sequence_mask", None, 1.5),
}


def check_equal(ours, theirs):
    tolerance = 1e-12 if theirs[0].dtype == torch.float64 else 1e-6
    for found, expected in zip(ours, theirs, strict=True):
        assert found.dtype == expected.dtype and expected.abs().max() > 1e-4
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", GRPO)
def test_a_method_has_trls_loss_gradient_and_advantages(trl, batch, name):
    settings, theirs = GRPO[name]
    *ours, clipped = computed_by_us(batch, **settings)
    check_equal(ours, computed_by_trl(trl.GRPOTrainer, batch, **theirs))
    assert clipped.any(), "the case is too easy: nothing is clipped"


@pytest.mark.parametrize("method", ["grpo", "dapo", "cispo", "gspo", "grpo with a divergence"])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_has_trls_loss_and_gradient(trl, batch, method, name):
    settings, theirs = GRPO[method]
    *ours, _ = computed_by_us(batch, correction=name, **settings)
    on = dict(use_vllm=True, vllm_importance_sampling_correction=True)
    mode, least, most = CORRECTIONS[name]
    on |= dict(vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_min=least)
    on |= dict(vllm_importance_sampling_clip_max=most)
    check_equal(ours, computed_by_trl(trl.GRPOTrainer, batch, **theirs, **on))
    off = computed_by_us(batch, **settings)
    assert (ours[0] - off[0]).abs() > 1e-4, "the case is too easy: the weights change nothing"


def test_the_loss_of_ones_own_in_the_docs_is_trls_sapo(trl, batch, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    (source,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def soft_gate" in block]
    (tmp_path / "mine.py").write_text(source)
    *ours, _ = computed_by_us(batch, loss=f"{tmp_path / 'mine.py'}:soft_gate", loss_reduction="sequence_mean")
    check_equal(ours, computed_by_trl(trl.GRPOTrainer, batch, loss_type="sapo"))


@pytest.mark.parametrize("beta", [0.0, 0.2])
def test_rloo_has_trls_loss_gradient_and_advantages(trl, batch, beta):
    settings = dict(advantage="rloo", loss="rloo", loss_reduction="sequence_mean", kl_estimator="k1")
    *ours, clipped = computed_by_us(batch, masked=False, kl_coefficient=beta, kl_in_reward=beta > 0, **settings)
    check_equal(ours, computed_by_trl(trl.RLOOTrainer, batch, masked=False, beta=beta))
    assert clipped.any() and not clipped.all()
