"""Rank 0: it decides everything from tickets, and holds no tensors."""
