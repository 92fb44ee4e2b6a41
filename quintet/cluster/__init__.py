"""Ray: placement, worker groups, dispatch protocols, failures."""
