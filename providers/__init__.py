"""Providers of alternatives, one per file."""
