"""Code that two or more methods share."""
