"""Tools that fail or lie, on a shop's service desk: which faults are noticed, and is the database right in the end?"""
