"""A teacher: the log-probs of a scorer's model as a gain in the advantages, or as a divergence in the loss."""
