"""`python -m replanning` is the command line."""

from __future__ import annotations

from replanning.cli import main

if __name__ == "__main__":
    main()
