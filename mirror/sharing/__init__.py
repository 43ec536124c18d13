"""Which worker carries what."""
