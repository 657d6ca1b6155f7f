"""One supervised server process: how it is started, watched and ended."""
