"""Weights out of the engine and into a rollout: buckets, the channels they take, and the proof that they arrived.

What runs on a rank that trains is `quintet.sync.server`; what a rollout opens, in its own process, `quintet.sync.source`,
which knows nothing of megatron-core.
"""
