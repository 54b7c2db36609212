"""One model, three spellings: Hugging Face on disk, a Megatron shard in training, a vLLM shard in rollout."""
