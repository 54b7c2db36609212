"""Seeds depend on what is drawn and on nothing else."""

from spmd_rl.data.seeds import derived_seed, sample_seed


def test_the_seed_of_a_sample_is_the_same_on_every_machine():
    assert [sample_seed(1, 0, 0, 0), sample_seed(1, 2, 3, 4)] == [479545651, 1970764611]


def test_seeds_fit_31_bits_and_differ():
    seeds = {
        sample_seed(run, step, prompt, sample)
        for run in (1, 2)
        for step in range(5)
        for prompt in range(10)
        for sample in range(10)
    }
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_neighbouring_numbers_are_not_confused():
    assert sample_seed(1, 11, 1, 0) != sample_seed(1, 1, 11, 0) != sample_seed(11, 1, 1, 0)
    assert derived_seed("a", 1) != derived_seed("b", 1)
