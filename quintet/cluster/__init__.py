"""Ray: placement, worker groups, dispatch protocols, failures.

Reading order: `cluster` (start, stop), `group` (the ranks and how they are called), `dispatch` (who gets what),
`rank_actor` and `worker` (inside a rank), `failures` and `process_probe` (what is said when a rank dies or hangs).
"""
