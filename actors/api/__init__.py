"""The Python API: a run that is started, watched and served from a notebook or a program (areal docs running).

In: keywords, functions and rows of the user's process. Out: a run, as a `LiveRun`. Read `live_run.py` first, then
`call_settings.py`, which makes the configuration. `local_actors.py` holds the actors that live in the user's process.
"""
