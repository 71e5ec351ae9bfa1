"""The Model Context Protocol: `toolcell mcp` serves a runtime to its clients."""
