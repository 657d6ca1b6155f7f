"""Transfer of weights from the trainer's tensors to the parameters of the servers."""
