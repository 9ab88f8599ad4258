"""One experiment: its settings, its run, its directory."""
