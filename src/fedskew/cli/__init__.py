"""The command line: `fedskew run`, `compare`, `table`, ... One file per group of commands."""
