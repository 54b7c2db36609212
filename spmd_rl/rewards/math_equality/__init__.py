"""Find the answer in a response, and decide whether two answers are equal."""
