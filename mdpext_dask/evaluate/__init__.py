"""Evaluation: what a finished mechanism costs its users."""
