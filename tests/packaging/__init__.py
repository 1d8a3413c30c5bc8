"""Tests of what is shipped: the wheel, the examples, the public names."""
