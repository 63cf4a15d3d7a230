"""Weights that live in host memory and pass through the device block by block."""
