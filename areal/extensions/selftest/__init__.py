"""`areal selftest` checks each part of a run by itself. Run the command first on new hardware."""
