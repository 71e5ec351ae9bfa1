"""The contract that every sandbox backend keeps, as test cases."""
