"""What one run learns of the clusters and tells of them, beside the cells."""
