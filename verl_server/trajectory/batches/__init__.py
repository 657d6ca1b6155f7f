"""Batches for trainers: how recorded paths and sessions become tensors."""
