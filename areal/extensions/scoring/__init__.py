"""`areal score`: what rewards give to completions in a file, and whether rows of a file can be trained on."""
