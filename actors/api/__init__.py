"""The Python API: a run that is started, watched and served from a notebook or a program (areal docs running).

In: keywords, functions and rows of the user's process. Out: a `LiveRun`. Read `live_run.py` first. `call_settings.py`
makes the configuration, `run_process.py` follows the run, `local_actors.py` has the actors in the user's process.
"""
