"""Ranks find each other whatever ranks before them left in the launcher's store."""

import threading
import time

import pytest
import torch.distributed as dist

from spmd_rl.distributed.rendezvous import NobodyThere, agree
from spmd_rl.distributed.world import World


def meet_all(store, size, delays=()):
    words = {}

    def come(rank):
        time.sleep(delays[rank] if delays else 0)
        words[rank] = agree(store, rank, size, 20)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(words) == size
    assert len(set(words.values())) == 1
    return words[0]


@pytest.mark.parametrize("delays", [(), (0.3, 0, 0, 0), (0, 0.3, 0.1, 0)])
def test_all_ranks_of_an_attempt_have_one_word_and_no_two_attempts_have_the_same(delays):
    store = dist.HashStore()
    assert len({meet_all(store, 4, delays) for _ in range(3)}) == 3


def test_an_attempt_of_fewer_ranks_may_follow():
    store = dist.HashStore()
    assert meet_all(store, 4) != meet_all(store, 2)
    assert meet_all(store, 1)


@pytest.mark.parametrize(("here", "named"), [(0, "ranks 1-2"), (1, "rank 0 did not come")])
def test_who_does_not_come_is_named(here, named):
    store = dist.HashStore()
    meet_all(store, 3)  # what these left is no heartbeat
    with pytest.raises(NobodyThere, match=named):
        agree(store, here, 3, 0.3)


def test_what_a_launch_has_begun_is_known_to_its_later_attempts_and_to_no_other_launch():
    launch = dist.HashStore()
    first, second = (
        World(0, 1, 0, 1, None, None, dist.PrefixStore("attempt", dist.PrefixStore(word, launch))) for word in "ab"
    )
    assert not first.begun() and not second.begun()
    first.begin()
    assert first.begun() and second.begun()
    assert not World(0, 1, 0, 1, None, None, dist.PrefixStore("a", dist.HashStore())).begun()
