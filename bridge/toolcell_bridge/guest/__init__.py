"""What runs next to the script: its channel to the host, the functions it may call, and the runner.

Shares a process with hostile code, so nothing here is a boundary: the host checks everything again.
"""
