"""Simulated federations, on one machine or on a Ray cluster."""
