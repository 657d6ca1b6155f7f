"""Weight transports. Each module is one way from the trainer to the servers, and contains both of its ends.

`Sender` runs on trainer rank 0 and sends what is staged in the arena. A transport without a `Sender` takes tensors as
they come, through a pair of buckets. `Receiver` runs in every TP rank of every server (see `base`).
A new module in this folder with a `Receiver` is a new transport. Its name is the value of
`WeightsConfig(transport=...)` and is listed in `verl_server.config.TRANSPORTS`.
"""
