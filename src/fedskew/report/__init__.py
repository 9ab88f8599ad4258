"""What people read: the HTML report of runs, the Markdown page of published tables, the pages of the methods."""
