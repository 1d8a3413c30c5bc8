"""Tests mirror the modules; `tests/integration` needs real parts and says which."""
