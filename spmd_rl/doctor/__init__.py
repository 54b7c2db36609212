"""What would stop or slow a run, found before it starts: each check is a function that returns findings."""
