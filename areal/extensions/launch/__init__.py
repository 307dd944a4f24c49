"""`areal launch TARGET run.yaml`: a run on the nodes of a cluster, by one file and one command.

In: a configuration with the section `cluster`, and the name of a target. Out: files in the run's folder, a job of the
target's scheduler, and sentences about mistakes. Read `placement.py` first, then `targets.py` for the duties of a
target, and `slurm.py`. Processes of the scheduler do all further work: no process of this extension stays.
"""
