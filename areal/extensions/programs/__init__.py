"""Judges programs that a model wrote: reads tests and runs them in a sandbox. Read code_tests.py first."""
