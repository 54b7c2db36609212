"""Run rules in processes that can be killed."""
