"""A federation on one machine or a Ray cluster."""
