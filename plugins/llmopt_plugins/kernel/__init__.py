"""Layer 5: how the model is run."""
