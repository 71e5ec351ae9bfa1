"""The WebSocket of `toolcell.service.Client`: sandboxes at the service, tools with the caller."""
