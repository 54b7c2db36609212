"""Laws of packing: each loss token once, predicted by the token before it, at its place in its own sequence."""

from itertools import count

import pytest
import torch

from spmd_rl.distributed.sample import Sample


def some_groups() -> list[list[Sample]]:
    """Return groups of one to three samples; no token is there twice, and some are not the policy's."""
    fresh = count(1)

    def tokens(length: int) -> torch.Tensor:
        return torch.tensor([next(fresh) for _ in range(length)])

    groups = []
    for prompt, responses in ((3, (4, 1, 6)), (5, (2,)), (1, (5, 3))):
        shared = tokens(prompt)
        groups.append([Sample.of(len(groups), shared, tokens(response)) for response in responses])
    groups[0][2].loss_mask[2:4] = False
    groups[2][0].loss_mask[0] = False
    return groups


@pytest.mark.parametrize("multiple, chunks", [(1, 1), (4, 1), (1, 2), (2, 3), (1, 5)])
@pytest.mark.parametrize("share", [True, False])
def test_each_loss_token_is_predicted_once_by_the_one_before_it_wherever_chunks_are_cut(share, multiple, chunks):
    from spmd_rl.training.packing import pack

    groups, found = some_groups(), {}
    for chunk in range(chunks):
        packed = pack(groups, multiple, share, torch.device("cpu"), chunk, chunks)
        assert packed.tokens.shape[1] % multiple == 0
        for place, at, target in zip(packed.places.tolist(), packed.predictors.tolist(), packed.targets, strict=True):
            assert place not in found, "another chunk has predicted it"
            found[place] = (int(packed.tokens[0, at]), int(packed.params.positions[at]), int(target))
    expected = []
    for sample in (sample for group in groups for sample in group):
        for index in sample.loss_mask.nonzero()[:, 0].tolist():
            before = sample.prompt_tokens + index - 1
            expected.append((int(sample.tokens[before]), before, int(sample.tokens[before + 1])))
    assert [found[place] for place in sorted(found)] == expected and sorted(found) == list(range(len(expected)))
