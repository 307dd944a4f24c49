"""What a run of rows with functions as rewards does not need. Each folder adds one thing and can be deleted."""
