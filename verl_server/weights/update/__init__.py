"""One weight update on the trainer side: validate, stage, commit."""
