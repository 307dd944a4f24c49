"""Pictures in prompts: rows with pictures, how models see them, and the vision of a model in training."""
