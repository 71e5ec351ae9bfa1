"""The Linux process backend: one zygote per runtime, one isolated child of it per sandbox."""
