"""The frame of every actor: the place in the run, handlers, addresses, logs, commands.

In: the master's address and events; signals. Out: a role that is made, beats, drains and leaves; a process that is
restarted after its death. Read `membership.py` first, for the table of the loops of every actor, then `actor.py`, for
the methods of a role. `directory.py` is the run as an actor sees it, `works.py` and `vitals.py` report on an actor's
work and resources, `supervisor.py` starts the processes of a machine, and `role_process.py` is such a process.
"""
