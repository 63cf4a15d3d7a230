"""Levers: where and when the bytes of a step exist. Nothing here changes a result."""
