"""The board: every method on a few tasks with tuned learning rates and paired seeds, and what it found."""
