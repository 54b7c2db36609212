"""Reinforcement-learning post-training of language models: one program on every rank, no Ray."""

__version__ = "0.1.0"
