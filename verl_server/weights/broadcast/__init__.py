"""Broadcast of weights from the trainer to servers on other machines: store, process group, mirror, byte ranges."""
