"""The output layer: its gradients are the plain formula's, also where they go straight into a learner's buffer."""

import pytest
import torch

from spmd_rl.patches.megatron_passes import embed_rows
from spmd_rl.platforms import current

N, WIDTH, ROWS, PADDED = 7, 8, 11, 14


@pytest.fixture(autouse=True)
def cpu():
    current("cpu")


def inputs(dtype=torch.float32):
    torch.manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(PADDED, WIDTH).to(dtype))
    return torch.randn(N, WIDTH).to(dtype).requires_grad_(), weight, torch.randint(0, ROWS, (N,))


def plain(hidden, weight, targets):
    logits = hidden.float() @ weight[:ROWS].float().T / 0.7
    p = logits.log_softmax(-1)
    return p.gather(1, targets[:, None])[:, 0], -(p.exp() * p).sum(-1)


@pytest.mark.parametrize("entropy", [0.0, 0.3])
@pytest.mark.parametrize("learns", [False, True])
def test_gradients_are_those_of_the_plain_formula_and_of_padding_zero(entropy, learns):
    from spmd_rl.training.token_logprobs import token_logprobs

    hidden, weight, targets = inputs()

    def gradients(compute):
        logprobs, entropies = compute()
        loss = (logprobs * torch.arange(N)).sum()
        (loss + entropy * entropies.sum() if entropy else loss).backward()
        found = hidden.grad, weight.grad
        hidden.grad = weight.grad = None
        return found

    wanted = gradients(lambda: plain(hidden, weight, targets))
    if learns:
        weight.main_grad = torch.ones(PADDED, WIDTH)
    found = gradients(lambda: token_logprobs(hidden, weight, targets, 0.7, 0, None, 3, ROWS))
    torch.testing.assert_close(found[0], wanted[0])
    if learns:
        assert found[1] is None, "what is in the buffer is not made a second time"
        found = found[0], weight.main_grad - 1.0
    torch.testing.assert_close(found[1], wanted[1], atol=1e-5, rtol=1e-5)
    assert not found[1][ROWS:].any()


def test_a_buffer_in_float32_keeps_what_half_precision_would_round():
    from spmd_rl.training.token_logprobs import token_logprobs

    hidden, weight, targets = inputs(torch.bfloat16)
    weight.main_grad = torch.zeros(PADDED, WIDTH)
    for _ in range(2):
        token_logprobs(hidden, weight, targets, 0.7, 0, None, 3, ROWS)[0].sum().backward()
    once = weight.main_grad / 2
    assert not torch.equal(once, once.bfloat16().float())


@pytest.mark.parametrize("learns", [False, True])
def test_the_gradient_of_an_embedding_goes_into_its_rows(learns):
    from types import SimpleNamespace

    _, weight, ids = inputs()
    module = SimpleNamespace(weight=weight, tp_group=SimpleNamespace(size=lambda: 1), reduce_scatter_embeddings=False)
    toward = torch.randn(1, N, WIDTH)
    reduce = pytest.MonkeyPatch()
    from megatron.core.tensor_parallel import mappings

    reduce.setattr(mappings, "reduce_from_tensor_model_parallel_region", lambda x, group: x)
    try:
        if learns:
            weight.main_grad = torch.ones(PADDED, WIDTH)
        (embed_rows(None)(module, ids[None]) * toward).sum().backward()
    finally:
        reduce.undo()
    wanted = torch.zeros(PADDED, WIDTH).index_add_(0, ids, toward[0])
    found = weight.main_grad - 1.0 if learns else weight.grad
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
    assert (weight.grad is None) == learns
