"""Read and write Hugging Face directories and checkpoints."""
