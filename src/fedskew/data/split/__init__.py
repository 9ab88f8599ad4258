"""How samples come to clients: chains of cuts, one partitioner, feature skews."""
