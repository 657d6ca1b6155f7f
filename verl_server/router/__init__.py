"""One router in front of many replicas: which replica takes a request, and what happens when a replica is lost."""
