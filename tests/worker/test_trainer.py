"""Test what a rank answers of its packed samples, without a model."""

from types import SimpleNamespace

import pytest
import torch

from spmd_rl.config.config import AlgorithmConfig

NOW = {7: [-1.0, -2.0, -0.5], 3: [-3.0], 5: [-1.5, -0.25]}
REFERENCE = {7: [-1.5, -1.0, -0.5], 3: [-2.0], 5: [-1.0, -1.25]}


def packed(*ids: int) -> SimpleNamespace:
    """Return a micro-batch of these samples."""
    fields = {"policy_logprobs": NOW, "reference_logprobs": REFERENCE}
    joined = {name: torch.tensor([number for one in ids for number in values[one]]) for name, values in fields.items()}
    samples = [SimpleNamespace(id=one) for one in ids]
    return SimpleNamespace(samples=samples, field=joined.get, lengths=[len(NOW[one]) for one in ids])


@pytest.mark.parametrize("reports", [True, False])
def test_a_samples_divergence_is_the_sum_over_its_tokens_from_the_ranks_that_report(reports):
    from spmd_rl.worker.trainer import Trainer

    rank = SimpleNamespace(
        place=SimpleNamespace(reports=reports),
        config=SimpleNamespace(algorithm=AlgorithmConfig(kl_estimator="k1")),
        packs=[[packed(7, 3), packed()], [packed(5)]],  # two mini-batches; one micro-batch is without samples
    )
    sums = {one: sum(NOW[one]) - sum(REFERENCE[one]) for one in NOW}
    assert dict(Trainer.sample_kl(rank)) == (pytest.approx(sums) if reports else {})
