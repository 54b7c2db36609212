"""Score a response by rules: each a function from a sample to a number or a cause."""
