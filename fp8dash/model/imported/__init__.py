"""Quantized checkpoints as models: their codes decoded, their casts of activations and KV scales read."""
