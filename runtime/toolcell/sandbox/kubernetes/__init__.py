"""Sandboxes in the pods of a Kubernetes cluster with agent-sandbox; tools, audit and limits stay with the caller."""
