"""The process backend's profile `container`: sandboxes in a container or pod that allows no namespaces."""
