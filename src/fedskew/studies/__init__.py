"""Several runs that belong together: comparisons, searches, published tables."""
