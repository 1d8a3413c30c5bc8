"""Public fakes for testing plans: providers, executors, clocks and faults."""
