"""What happens to bytes between fetch and produce. Pure."""
