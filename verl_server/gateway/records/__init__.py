"""The files of a gateway: the lock of its folder, and its open records."""
