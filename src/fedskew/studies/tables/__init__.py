"""Published tables as recipes: run, compared with the paper, judged."""
