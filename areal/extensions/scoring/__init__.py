"""`areal score`: scores completions in a file with rewards, and checks rows before a run. Read score.py first."""
