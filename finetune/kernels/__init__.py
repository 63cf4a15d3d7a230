"""Kernels: one operation a file, the plain reference first."""
