"""Plan repair over facts, for the `repair` provider."""
