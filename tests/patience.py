"""How long tests let things take: they share the machine with other tests, and with whatever else it does."""

BUSY = 4
"""What is promised within some seconds may here take so many times as long."""
