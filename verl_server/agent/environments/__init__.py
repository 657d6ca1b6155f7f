"""Environments: the state, the rewards, the setup and the teardown of one sample."""
