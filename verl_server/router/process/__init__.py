"""The router in a process of its own: its entry, its supervisor in the fleet's process, and its sources of replicas."""
