"""Fleets: many servers that behave as one engine. Replicas, their manager, weight updates and recovery.

The public names are in `verl_server`: `RolloutManager`, `LocalLauncher`, `RecoveryConfig` and `RolloutMode`.
"""
