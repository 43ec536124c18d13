"""From fetched bytes to cells."""
