"""Tests of the pages in the browser."""
