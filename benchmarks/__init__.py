"""Benchmarks of the library, through its public names. `python -m benchmarks --help` lists them."""
