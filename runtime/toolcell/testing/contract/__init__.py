"""The contract that every sandbox backend meets, as test cases."""
