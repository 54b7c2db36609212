"""Sums of gradients and gathered weights where they lie, equal to gloo's own to the last bit, without its copies."""

import pytest

from spmd.ranks import run_ranks


@pytest.mark.spmd
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_buffer_is_summed_and_gathered_in_place_as_gloo_does_through_a_copy(ranks):
    for found in run_ranks("spmd.gloo_ranks", ranks, {"elements": 4 << 20}):
        for said in found.values():
            extra = said["extra"]
            assert said["sums"] and said["weights"] and said["elsewhere"], said
            # Gloo's own buffers for messages are a few MiB, whatever is sent.
            assert extra["summed in place"] < 0.3 and extra["gathered in place"] < 0.3, extra
            assert extra["summed"] > 0.8 and extra["gathered"] > 0.8, extra
