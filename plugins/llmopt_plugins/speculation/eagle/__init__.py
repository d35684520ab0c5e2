"""Drafts from a small head on the target's own hidden states."""
