"""Triton kernels, one file an operation. Each has its plain reference in the file of the same name one folder up.

Importing a file here needs Triton; the files above import them only when a tensor is on a GPU.
"""
