"""Verbs of the loop over ranks: generate, score, update, publish; device hand-over, weight sync and its check.

Reading order: `controller` (the verbs), `worker` (one rank), `colocation` (who has the devices), `replicas` and `weight_sync`
(rollouts in processes of their own).
"""
