"""One module per command group of `millrace`; each imports what it runs only when it runs."""
