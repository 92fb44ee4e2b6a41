"""The outer loops: reinforcement learning, supervised fine-tuning, generation and evaluation.

Reading order: `ppo` (the loop), `algorithms` (what it is told of GRPO, DAPO and PPO), `source` (samples); its verbs are in
`quintet.controller`.
"""
