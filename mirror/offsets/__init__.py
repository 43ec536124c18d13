"""Source offset to target offset, and groups that move by it."""
