"""The native decoder."""
