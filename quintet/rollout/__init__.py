"""Generation back ends behind one protocol."""
