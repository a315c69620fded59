"""Weights of GGUF files: the numbers in their blocks, and the tensors under transformers' names."""
