"""What a run will need: memory of a rank by part, room on the disk. Pure Python: it answers before anything is built."""
