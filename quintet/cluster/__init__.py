"""Ray: placement, worker groups, dispatch protocols, failures.

Reading order: `cluster` (start, stop), `group` (the ranks and how they are called), `dispatch` (who gets what),
`seat` and `worker` (inside a rank), `failures` and `probe` (what is said when a rank dies or hangs).
"""
