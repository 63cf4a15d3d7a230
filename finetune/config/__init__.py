"""What a recipe may say, how it is read, and which choices contradict each other. Imports no torch."""
