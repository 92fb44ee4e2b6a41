"""Layers that megatron-core's specs are filled with: attention, experts, norms, multi-token prediction."""
