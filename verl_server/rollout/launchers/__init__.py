"""Launchers, which start the servers of a fleet: the interface, one for this machine, one for a Ray cluster."""
