"""Scores of models, and the one vocabulary of figures."""
