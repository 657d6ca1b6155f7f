"""The forkserver: a process that has imported SGLang and forks servers."""
