"""HTTP libraries of a script without a socket: the host makes their requests, as calls over the bridge.

`connection` speaks HTTP/1.1 with a library, `host_calls` makes the calls, `hooks` changes each library when it is
imported. Nothing here is imported in a run that may send no requests.
"""
