"""Rollouts of agent programs: each sample runs a program in a sandbox, and the program acts through the gateway."""
