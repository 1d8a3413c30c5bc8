"""Tools for plans run from the command line."""
