"""Isolation that a process applies to itself before it runs code it does not trust.

One module per layer. Each holds its plan as frozen data and applies it with plain system calls. Importable on every
platform, callable on Linux only. Nothing here knows the bridge, the guest or the host.
"""
