"""Checkpoints whose weights a maker's library has quantised: AWQ, GPTQ and compressed-tensors."""
