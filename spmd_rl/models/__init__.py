"""Know the model families: architectures and shapes from config.json; no torch."""
