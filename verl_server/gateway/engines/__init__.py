"""What generates for a gateway: an engine that runs already, or servers that may start later and come and go.

- `engine_source.py`: what a gateway needs of them.
- `known_engine.py`: an engine of this library, as `RolloutRunner` takes it.
- `discovered_servers.py`: servers by their URLs or by their names on a Ray cluster, with a router of their own.
"""
