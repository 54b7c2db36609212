"""The mutation check still fits the code that it changes."""

import pytest

from tools import mutations


@pytest.mark.slow
def test_every_mutation_changes_one_place_of_the_code_and_names_tests_that_are_there():
    assert len(mutations.MUTATIONS) >= 20
    for mutation in mutations.MUTATIONS:
        assert (mutations.ROOT / mutation.file).read_text().count(mutation.old) == 1, mutation
        assert mutation.old != mutation.new
        assert all((mutations.ROOT / place).exists() for place in mutation.tests.split()), mutation
