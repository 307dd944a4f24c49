"""What starts a run, or one role of it, from a command line."""
