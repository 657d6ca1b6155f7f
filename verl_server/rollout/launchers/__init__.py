"""Launchers, which start the servers of a fleet: the interface, one for this machine, two for a Ray cluster."""
