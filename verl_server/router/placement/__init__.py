"""Which replica runs a request: the replicas of a router ordered by load, their errors, and the waiting requests."""
