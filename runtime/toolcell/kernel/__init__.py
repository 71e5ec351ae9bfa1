"""A Jupyter kernel whose cells run in a sandbox: `toolcell kernel install`."""
