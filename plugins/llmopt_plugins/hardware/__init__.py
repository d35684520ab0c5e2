"""Layer 7: the machine."""
