"""What runs next to the script: its channel to the host, the functions it may call, and the runner.

It shares a process with hostile code, so nothing here isolates anything: the host checks everything again.
"""
