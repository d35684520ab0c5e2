"""Layer 2: who runs, with how many tokens, and when."""
