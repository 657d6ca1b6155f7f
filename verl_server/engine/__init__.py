"""`VerlEngine`: one rollout engine for a group of trainer ranks."""
