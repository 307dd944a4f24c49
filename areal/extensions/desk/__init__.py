"""The desk: tools for the record of a run, such as report, compare, replay and audit. No run imports the desk."""
