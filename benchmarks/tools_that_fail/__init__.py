"""Tools that fail or lie, at a shop's service desk: counts the detected faults and the correct final databases."""
