"""Where a router process gets its replicas from: a fleet (`pipe`) or a fixed list (`static`)."""
