"""Ranks and their layout, rank 0's verbs to all, and samples on their way from rank to rank."""
