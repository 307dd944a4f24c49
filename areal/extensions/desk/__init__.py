"""The desk: tools that read the record of a run, such as report, compare, replay and audit. No run imports it."""
