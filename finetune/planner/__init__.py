"""The planner: what a machine has, what a recipe needs, and the fastest exact way to bring them together."""
