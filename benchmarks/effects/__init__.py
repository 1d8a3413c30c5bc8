"""A payment without an answer and a half-finished booking, here and in other frameworks."""
