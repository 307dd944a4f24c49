"""What the master is made of: the state of the run, members, evaluations, progress, what hangs, full disks."""
