"""Which experts vLLM chose for each token: by position, also of tokens that were in its cache."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from spmd_rl.rollout.expert_capture import ExpertCapture

LAYERS, K, BLOCK = 3, 2, 4
PROMPT = tuple(range(10, 20))


class MoERunner(torch.nn.Module):
    """As much of vLLM's as is asked for."""

    def __init__(self, layer):
        super().__init__()
        self.layer_id, self.router = layer, SimpleNamespace(set_capture_fn=lambda heard: setattr(self, "heard", heard))


@pytest.fixture
def engine(monkeypatch):
    """A runner whose first layer is dense; `step` computes (request, first position, tokens) as vLLM does."""
    parts = "vllm.model_executor.layers.fused_moe.layer".split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    sys.modules[".".join(parts)].MoERunner = MoERunner
    model = torch.nn.ModuleList([torch.nn.Linear(1, 1), MoERunner(1), MoERunner(2)])
    runner = SimpleNamespace(get_model=lambda: model, input_batch=None, query_start_loc=None)

    def step(*computed):
        counts = [count for _, _, count in computed]
        runner.input_batch = SimpleNamespace(
            req_ids=[f"{name}-0a1b2c3d" for name, _, _ in computed],
            num_computed_tokens_cpu=np.array([start for _, start, _ in computed]),
        )
        runner.query_start_loc = SimpleNamespace(np=np.concatenate(([0], np.cumsum(counts))))
        for layer in (1, 2):
            rows = [chosen(layer, start + at) for _, start, count in computed for at in range(count)]
            # Rows behind the last request's are padding.
            model[layer].heard(torch.tensor([*rows, [99, 99]], dtype=torch.int32))

    return ExpertCapture(runner, LAYERS, BLOCK), step


def chosen(layer, position):
    return [layer * 10 + position % 7, position]


def expected(tokens):
    return torch.tensor([[[0, 0], chosen(1, at), chosen(2, at)] for at in range(tokens)], dtype=torch.int16)


def test_each_token_has_what_was_chosen_at_its_position(engine):
    capture, step = engine
    capture.begin("7", PROMPT, 16)
    capture.begin("8", PROMPT[:3], 16)
    step(("7", 0, 6), ("8", 0, 3), ("a canary's", 0, 2))
    step(("8", 3, 1), ("7", 6, 4))
    step(("7", 10, 1))
    assert torch.equal(capture.end("8", 4), expected(4))
    assert torch.equal(capture.end("7", 11), expected(11))


def test_tokens_of_the_cache_have_what_was_chosen_when_they_were_computed(engine):
    capture, step = engine
    capture.begin("1", PROMPT, 16)
    step(("1", 0, 10))
    # The second sample of the group ends before the first, and another prompt has a beginning in common with it.
    capture.begin("2", PROMPT, 16)
    capture.begin("3", (*PROMPT[:4], 1, 2, 3), 16)
    step(("1", 10, 1), ("2", 8, 2), ("3", 4, 3))
    assert torch.equal(capture.end("2", 10), expected(10))
    assert torch.equal(capture.end("3", 7), expected(7))


def test_what_was_chosen_with_other_weights_is_forgotten(engine):
    capture, step = engine
    capture.begin("1", PROMPT, 16)
    step(("1", 0, 10))
    capture.end("1", 10)
    capture.forget_cache()
    capture.begin("2", PROMPT, 16)
    step(("2", 8, 2))
    with pytest.raises(KeyError):
        capture.end("2", 10)
