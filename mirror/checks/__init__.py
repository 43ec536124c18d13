"""A config against live clusters, before anything is carried."""
