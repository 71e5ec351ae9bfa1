"""One call of a tool: its arguments and their checks, its context, what hooks decide of it, and its result.

No names here: import them from the modules. A tool, a run and a record are made of these.
"""
