"""The Model Context Protocol: `toolcell mcp` serves a runtime to clients, and `client` uses the tools of servers."""
