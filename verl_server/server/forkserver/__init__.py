"""The forkserver: a process that has imported an engine and forks servers."""
