"""One run: from a validated request to an `ExecutionResult`."""
