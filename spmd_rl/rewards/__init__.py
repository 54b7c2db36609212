"""Text in, number and cause out. What a grader process imports stays light: no torch, no vLLM, no transformers."""
