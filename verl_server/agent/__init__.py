"""Agents: how one acts (`loops`), with what (`tools`), within which limits, and what is kept of it (`rollout`)."""
