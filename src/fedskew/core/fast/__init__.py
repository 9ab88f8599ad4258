"""What is there only for speed; the plain twin of each part gives the same results."""
