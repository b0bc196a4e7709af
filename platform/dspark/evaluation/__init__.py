"""Accepted length, confidence and reports."""
