"""Two buckets that are filled and emptied in turn, for staging memory that is smaller than the model."""
