"""The door to vLLM."""
