"""The door to Megatron-Core: the model, its passes over packed samples, and its optimizer."""
