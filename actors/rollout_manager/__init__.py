"""The rollout manager: turns permits into scored samples, and hands the samples to the trainer.

In: permits of the master, rows of the data, tokens and scores. Out: scored samples, in groups. Read
`rollout_manager.py` first, with the table of loops. `group_run.py` reads the row of a group and samples the group.
`saved_groups.py` gets the saved work of an earlier manager, and `scorer_columns.py` has scorers score a sample.
"""
