"""Sandboxes of tasks: containers in which a policy works on files, and the tests that judge its work."""
