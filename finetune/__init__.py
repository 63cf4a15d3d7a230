"""Fine-tune LLaMA-class models inside whatever memory you have."""
