"""The Linux process backend: a zygote per runtime, a forked and walled-in child per sandbox."""
