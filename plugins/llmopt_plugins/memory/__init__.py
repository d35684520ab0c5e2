"""Layer 6: KV memory."""
