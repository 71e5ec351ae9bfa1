"""Measures toolcell beside other ways to run a model's Python. Run `python -m benchmarks` from the repository root."""
