"""`areal selftest`: what a user runs first on new hardware. It checks each part of a run by itself."""
