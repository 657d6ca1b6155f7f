"""Episodes: one sample of an agent, its branches, and their record."""
