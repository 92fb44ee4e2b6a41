"""Verifiable rewards and the user's own reward functions."""
