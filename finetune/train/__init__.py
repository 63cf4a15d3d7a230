"""The rooms of a run: the page that starts it, the loop, the step, its state, and what follows it."""
