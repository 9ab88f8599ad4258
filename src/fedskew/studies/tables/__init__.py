"""Published tables: recipes, their runs, and verdicts that compare ours with the paper's."""
