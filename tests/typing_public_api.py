"""What a user's type checker sees of the public API: pyright checks this file, nobody runs it."""

from __future__ import annotations

import replanning

assert replanning.__doc__
