"""Reading a source cluster: discovery, fetch loops, what its logs say, how fast and how far behind."""
