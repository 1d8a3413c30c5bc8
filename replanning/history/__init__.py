"""The journal of a run, the stores that keep it and the reports drawn from it."""
