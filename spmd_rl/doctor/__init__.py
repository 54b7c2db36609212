"""Find what would stop or slow a run before it starts: each check is a function that returns findings."""
