"""The contract of an Executor. A package, so that its executors end when its last test does."""
