"""The nouns that travel, and where prompts come from; no torch."""
