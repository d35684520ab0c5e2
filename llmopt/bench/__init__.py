"""Measure the pipeline against ``model.generate`` on named workloads; `llmopt bench` is its face."""
