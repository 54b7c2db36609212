"""Estimate, from sizes alone, what a run takes of memory and time; no torch."""
