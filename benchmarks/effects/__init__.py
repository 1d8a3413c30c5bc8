"""What becomes of a payment without an answer, and of a half-done booking, here and in other frameworks."""
