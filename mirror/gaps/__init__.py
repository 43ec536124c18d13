"""What could not be carried: classes, policies, events, advice."""
