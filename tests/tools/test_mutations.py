"""The mutation check still fits the code that it changes."""

import pytest

from tools import mutations


def named(place):
    """Return whether a file or a test of it is there."""
    file, _, test = place.partition("::")
    path = mutations.ROOT / file
    return path.exists() and (not test or f"def {test}(" in path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_every_mutation_changes_one_place_of_the_code_and_names_tests_that_are_there():
    assert len(mutations.MUTATIONS) >= 20
    for mutation in mutations.MUTATIONS:
        assert (mutations.ROOT / mutation.file).read_text().count(mutation.old) == 1, mutation
        assert mutation.old != mutation.new
        assert all(named(place) for place in mutation.tests.split()), mutation
