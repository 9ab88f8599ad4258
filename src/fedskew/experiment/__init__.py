"""One experiment: its settings, its run, and the directory of its results."""
