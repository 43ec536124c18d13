"""What operators see and want: HTTP, wishes, metrics."""
