"""Optimizers, parameter groups and learning-rate schedules: what changes trained weights after a gradient is known."""
