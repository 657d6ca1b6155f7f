"""Many servers that behave as one: replicas, the router in front of them, their manager, recovery."""
