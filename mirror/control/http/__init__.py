"""The mirror's HTTP surface: the server, who may call what, what is served, and its description."""
