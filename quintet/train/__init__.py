"""The outer loops: reinforcement learning, supervised fine-tuning, generation and evaluation.

Reading order: `ppo` (the loop), `controller` (the loop's verbs, spread over the ranks), `worker` (one rank).
"""
