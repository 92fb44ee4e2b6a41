"""Triton kernels: log-probs of the head, gated MLPs, rotary positions, fingerprints."""
