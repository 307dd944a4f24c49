"""What every actor is made of: its place in the run, its handlers, its addresses, its logs, its commands.

In: the master's address and events; signals. Out: a role that is made, beats, drains and leaves; a process that is
started again if it dies. Read `membership.py` first, which has the table of the loops that every actor has, then
`actor.py`, which says what a role implements. `directory.py` is the run as an actor knows it, `works.py` and
`vitals.py` say what an actor is at and what it uses. `supervisor.py` starts the processes of a machine, each a
`role_process.py`.
"""
