"""The output layer: its gradients are the plain formula's, also where they go straight into a learner's buffer."""

import pytest
import torch

from spmd_rl.patches.megatron_passes import add_gradients, embed_rows
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
@pytest.mark.parametrize("chunk", [3, N])
@pytest.mark.parametrize("learns", [False, True])
def test_gradients_are_those_of_the_plain_formula_and_of_padding_zero(entropy, learns, chunk):
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
    found = gradients(lambda: token_logprobs(hidden, weight, targets, 0.7, 0, None, chunk, ROWS))
    torch.testing.assert_close(found[0], wanted[0])
    if learns:
        assert found[1] is None, "what is in the buffer is not made a second time"
        found = found[0], weight.main_grad - 1.0
    torch.testing.assert_close(found[1], wanted[1], atol=1e-5, rtol=1e-5)
    assert not found[1][ROWS:].any()


@pytest.mark.parametrize(("chunk", "products"), [(3, [3, 5, 8]), (N, [1, 1, 2]), (100, [1, 1, 2])])
def test_logits_of_the_last_chunk_are_kept_for_one_pass_backward(chunk, products, monkeypatch):
    from spmd_rl.training import token_logprobs as module

    hidden, weight, targets = inputs()
    made = []
    logits_of = module._logits
    monkeypatch.setattr(module, "_logits", lambda *given: made.append(0) or logits_of(*given))
    logprobs, entropies = module.token_logprobs(hidden, weight, targets, 0.7, 0, None, chunk, ROWS)
    counted, found = [len(made)], []
    for _ in range(2):
        hidden.grad = weight.grad = None
        (logprobs.sum() + 0.3 * entropies.sum()).backward(retain_graph=True)
        found.append((hidden.grad, weight.grad))
        counted.append(len(made))
    assert counted == products
    for kept, made_again in zip(*found, strict=True):
        assert torch.equal(kept, made_again), "what is kept has the bits of what is made again"


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


@pytest.mark.parametrize("rows", [3, 1024, 1025, 5000])
def test_logits_are_those_of_one_product_whatever_the_vocabulary(rows):
    from spmd_rl.platforms.cpu_logits import logits

    torch.manual_seed(5)
    hidden, weight = torch.randn(N, 64), torch.randn(rows, 64)
    with torch.no_grad():
        torch.testing.assert_close(logits(hidden, weight), hidden @ weight.T, atol=1e-5, rtol=1e-5)
        assert logits(hidden[:0], weight).shape == (0, rows)
        assert logits(hidden.bfloat16(), weight.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("tokens", [1, N])
def test_a_linear_layer_adds_the_gradient_of_its_weight_to_those_before(tokens, monkeypatch):
    from megatron.core.tensor_parallel import layers

    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", add_gradients(None), raising=False)
    torch.manual_seed(6)
    x, weight = torch.randn(tokens, 1, WIDTH, requires_grad=True), torch.nn.Parameter(torch.randn(ROWS, WIDTH))
    toward = torch.randn(tokens, 1, ROWS)
    weight.main_grad = torch.full((ROWS, WIDTH), 0.5)
    for _ in range(2):
        linear = layers.LinearWithGradAccumulationAndAsyncCommunication.apply
        linear(x, weight, None, True, False, False, None, None, None).backward(toward)
    wanted = toward[:, 0].T @ x[:, 0]
    torch.testing.assert_close(weight.main_grad - 0.5, 2 * wanted, atol=1e-5, rtol=1e-5)
    assert weight.grad is None, "Megatron's own hook does not add it a second time"
    torch.testing.assert_close(x.grad, 2 * (toward @ weight.detach()), atol=1e-5, rtol=1e-5)
