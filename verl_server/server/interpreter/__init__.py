"""Another Python interpreter than the trainer's for the server: its checks, its environment and its `verl_server`."""
