"""The live page of the gateway: its sessions, and the turns and tokens of each session."""
