"""What a run will need: memory of a rank by part. Pure Python: it answers before anything is built."""

from quintet.plan.memory import Memory, rank_memory
from quintet.plan.setup import Place, Setup

__all__ = ["Memory", "Place", "Setup", "rank_memory"]
