"""Judging programs that a model wrote: tests in their published forms, and the sandbox that runs them."""
