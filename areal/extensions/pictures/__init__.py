"""Pictures in prompts: rows with pictures, how models see, and a model's vision in training. Read vision.py first."""
