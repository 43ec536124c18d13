"""Which topic goes where, and target topics like their sources'."""
