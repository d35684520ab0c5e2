"""Layer 3: drafts, several tokens per forward."""
