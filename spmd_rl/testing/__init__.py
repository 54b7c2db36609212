"""Disturb runs on purpose: fault injection. Imported only with --inject, by tools and by tests."""
