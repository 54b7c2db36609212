"""What users hold on to stays: settings with their defaults (metrics and files: tests/spmd/test_program.py)."""

import pytest

from promised import all_settings, promised


def test_no_setting_goes_or_changes_its_default():
    assert set(promised("settings")) - set(all_settings()) == set()


@pytest.mark.slow
def test_every_setting_is_promised():
    assert set(all_settings()) - set(promised("settings")) == set(), "cd tests && PYTHONPATH=.. python -m promised"
