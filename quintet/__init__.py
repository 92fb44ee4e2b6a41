"""quintet: reinforcement-learning post-training of language models on Megatron-style parallelism."""
