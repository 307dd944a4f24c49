"""What a training step learns from a batch: the advantages of its tokens, and the loss of each."""
