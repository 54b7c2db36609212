"""Ask held-out questions: benchmarks, their statistics, reports."""
