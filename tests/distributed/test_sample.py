"""A sample is named tensors, and travels as it is."""

import pytest
import torch

from spmd_rl.distributed.sample import Sample, from_wire, to_wire

TENSORS = {
    "rollout_logprobs": torch.randn(3) * 1e-3,
    "values": torch.randn(3, dtype=torch.float64),
    "half": torch.randn(3).bfloat16(),
    "pixel_values": torch.arange(3 * 4 * 5, dtype=torch.uint8).view(3, 4, 5),
    "transposed": torch.arange(6).view(2, 3).T,
    "flags": torch.tensor([True, False]),
    "nothing": torch.zeros(0, 7, dtype=torch.int16),
    "one number": torch.tensor(2.5),
}


def sample(id: int, **fields: torch.Tensor) -> Sample:
    return Sample(id, torch.arange(4 + id, dtype=torch.int32), 2, torch.arange(2 + id) % 2 == 0, fields)


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [sample(0)],
        [sample(1, **TENSORS)],
        [sample(3, a=torch.ones(1)), sample(1, **TENSORS), sample(0)],
        [
            sample(i, a=torch.ones(i, 2, dtype=dtype))
            for i, dtype in enumerate((torch.float16, torch.int64, torch.int8))
        ],
    ],
)
def test_samples_on_the_wire_come_back_bit_for_bit(samples):
    wire = to_wire(samples)
    assert wire.dtype == torch.uint8 and bool(samples) == bool(len(wire))
    back = list(from_wire(wire))
    wire.zero_()  # nothing of it is in use any more
    assert [one.id for one in back] == [one.id for one in samples]
    for found, made in zip(back, samples, strict=True):
        assert found.prompt_tokens == made.prompt_tokens and found.fields.keys() == made.fields.keys()
        for one, other in zip(
            (found.tokens, found.loss_mask, *found.fields.values()),
            (made.tokens, made.loss_mask, *made.fields.values()),
            strict=True,
        ):
            assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def test_a_field_is_named_once_for_all_samples_of_a_message():
    name = "a_rather_long_name_of_a_field"
    one, two = (len(to_wire([sample(0, **{name: torch.ones(1)})] * count)) for count in (1, 2))
    assert two - one < len(name) + len(to_wire([])) + 30


def test_what_is_put_stands_at_the_loss_tokens_and_nothing_at_the_others():
    one = Sample(0, torch.arange(6), 2, torch.tensor([True, False, True, True]))
    assert one.loss_tokens == 3 and one.prompt.tolist() == [0, 1] and one.response.tolist() == [2, 3, 4, 5]
    one.put("advantages", 0.1)
    one.put("values", torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    assert torch.equal(one.fields["advantages"], torch.tensor([0.1, 0.0, 0.1, 0.1]))
    assert torch.equal(one.fields["values"], torch.tensor([1.0, 0.0, 2.0, 3.0], dtype=torch.float64))


def test_the_policy_wrote_all_of_a_response_unless_somebody_says_otherwise():
    one = Sample.of(3, torch.tensor([5, 6]), torch.tensor([7]), rollout_logprobs=torch.tensor([-1.0]))
    assert one.tokens.tolist() == [5, 6, 7] and one.loss_mask.tolist() == [True] and one.loss_tokens == 1
