"""Work on each element of a list, with some failures, here and in other frameworks."""
