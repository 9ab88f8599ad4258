"""Runs between real sites on a network, with Flower as the transport."""
