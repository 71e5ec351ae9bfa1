"""Compare toolcell with other ways to run a model's Python: `python -m benchmarks`, from the repository's root."""
