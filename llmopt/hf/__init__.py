"""The boundary to Hugging Face: how its models are run on foreign KV, and how its `generate` is served."""
