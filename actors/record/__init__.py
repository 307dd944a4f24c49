"""The run's record as actors keep it: what it lacks, ways back, forks, copies."""
