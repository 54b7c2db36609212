"""Read what runs have left: curves, figures, self-correction, comparison. Nothing that runs imports this."""
