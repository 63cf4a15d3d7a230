"""Answers and evaluation."""
