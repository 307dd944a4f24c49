"""The start of a run, or of one role, from a command line, and the checks before the start.

In: the words of a command. Out: the processes of a run, or a UserError. Read `run_command.py` first, then
`preflight.py`, which checks the configuration, and `row_checks.py`, which checks rows.
"""
