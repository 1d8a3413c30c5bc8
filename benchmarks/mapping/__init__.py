"""The same work for each element of a list, some of which fail, here and in other frameworks."""
