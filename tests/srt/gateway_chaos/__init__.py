"""A client that repeats requests and drops streams, faults of replicas and of the gateway, and the check of records.

- `dialects.py`: requests and replies of three APIs, as a client sees them.
- `client.py`: conversations over HTTP, with repeated requests and dropped streams.
- `faults.py`: kills of replicas and weight updates; a gateway in a process of its own that is killed.
- `checking.py`: compares the records with what the client got.
"""
