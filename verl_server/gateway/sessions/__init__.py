"""Sessions of the gateway: their token graphs, turns, keys and settings files. No HTTP."""
