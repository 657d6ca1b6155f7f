"""What agents did, token by token: a graph of turns, its record on disk, and the batches that trainers take from it."""
