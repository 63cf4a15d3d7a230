"""What a kind of job computes."""
