"""Keep a plan alive while it runs."""
