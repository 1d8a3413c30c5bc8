"""Programs that convert a list of documents, one for each framework."""
