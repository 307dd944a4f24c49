"""Programs for sandboxes: right ones, attacks, and rows of known sets."""
