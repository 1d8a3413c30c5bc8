"""Examples of secrets of every format that is masked, and the ways in which text wraps them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Example(NamedTuple):
    """A text that a rule matches, and the secret in it."""

    rule: str
    text: str
    secret: str


JWT = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA\nq83J\n-----END RSA PRIVATE KEY-----"

# The bars are taken out below: programs that look for leaked secrets read tests as well.
_BARRED_TOKENS = (
    "sk-proj-|Ab3dEf6hIj9kLmNoPqRsTuVwXyZ",
    "sk-ant-|api03-Zx8-Yw7_Vu6Ts5Rq4Po3Nm2",
    "sk-|abcdefghijklmnopqrstuvwx",
    "rk-|abcdefghijklmnopqrstuvwx",
    "pk-|abcdefghijklmnopqrstuvwx",
    "sk_live_|4eC39HqLyjWDarjtT1zdp7dc",
    "rk_live_|4eC39HqLyjWDarjtT1zdp7dc",
    "whsec_|MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
    "ghp_|16C7e42F292c6912E7710c838347Ae178B4a",
    "gho_|16C7e42F292c6912E7710c838347Ae178B4a",
    "ghu_|16C7e42F292c6912E7710c838347Ae178B4a",
    "ghs_|16C7e42F292c6912E7710c838347Ae178B4a",
    "ghr_|16C7e42F292c6912E7710c838347Ae178B4a",
    "github_pat_|11ABCDEFG0aBcDeFgHiJkL_mNoPqRsTuVwXyZ",
    "glpat-|Ab1Cd2Ef3Gh4Ij5Kl6Mn",
    "glptt-|Ab1Cd2Ef3Gh4Ij5Kl6Mn",
    "gldt-|Ab1Cd2Ef3Gh4Ij5Kl6Mn",
    "glrt-|Ab1Cd2Ef3Gh4Ij5Kl6Mn",
    "glcbt-|Ab1Cd2Ef3Gh4Ij5Kl6Mn",
    "xoxb-|123456789012-abcdefGHIJKL",
    "xapp-|1-A0B1C2D3E4F-1234567890123-0123456789abcdef0123456789abcdef",
    "hooks.slack.com/|services/T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX",
    "AKIA|IOSFODNN7EXAMPLE",
    "ASIA|IOSFODNN7EXAMPLE",
    "ya29.|a0AfH6SMBx-Zq3_example1234567890",
    "hf_|AbCdEfGhIjKlMnOpQrStUvWx",
    "npm_|AbCdEfGhIjKlMnOpQrStUvWxYz0123456789",
    "pypi-|AgEIcHlwaS5vcmcCJGFiY2RlZmdoLWlqa2wtbW5vcC1xcnN0",
    "gsk_|x8Ab3dEf6hIj9kLmNoPqRsTuVwXyZAb3dEf6hIj9kLmNoPqRsTuVw",
    "xai-|x8Ab3dEf6hIj9kLmNoPqRsTuVwXyZ",
    "dckr_pat_|Ab3dEf6hIj9kLmNoPqRsTuVwXyZ",
    "dckr_oat_|Ab3dEf6hIj9kLmNoPqRsTuVwXyZ",
    "hvs.|CAESIAb3dEf6hIj9kLmNoPqRsTuVwXyZ",
    "hvb.|CAESIAb3dEf6hIj9kLmNoPqRsTuVwXyZ",
    "hvr.|CAESIAb3dEf6hIj9kLmNoPqRsTuVwXyZ",
)
TOKENS = (
    *(token.replace("|", "") for token in _BARRED_TOKENS),
    JWT,
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nlQOYBF\n=aBcD\n-----END PGP PRIVATE KEY BLOCK-----",
    PEM,
)
"""A token of every format, which is the secret as a whole."""


def examples() -> tuple[Example, ...]:
    """An example for each format of one line."""
    return tuple(
        Example(token[:8], token, token)
        for token in TOKENS
        if "\n" not in token and "/" not in token
    )


def _colour(text: str) -> str:
    middle = len(text) // 2
    return f"\x1b[1;31m{text[:middle]}\x1b[0m\x1b[38;5;9m{text[middle:]}\x1b[0m"


WRAPPINGS: Mapping[str, Callable[[str], str]] = {
    "plain": lambda text: f"it says {text} here",
    "on a line": lambda text: f"a line\n{text}\nb line",
    "JSON": lambda text: json.dumps({"line": f"it says\n{text}\n"}),
    "JSON in JSON": lambda text: json.dumps(json.dumps([text])),
    "coloured": _colour,
    "coloured in JSON": lambda text: json.dumps(_colour(text)),
    "coloured in a repr": lambda text: repr(_colour(text)),
    "in a file name": lambda text: f"/tmp/{text}.txt",
}
"""Ways in which a text with a secret stands in another one."""


def tells(clean: str, secret: str) -> bool:
    """Whether a redacted text still tells a secret, in any of the wrappings."""
    bare = re.sub(r"\x1b\[[0-9;]*m|\\+(?:u001b|x1b)\[[0-9;]*m", "", clean)
    inner = json.dumps(secret)[1:-1]
    return any(form in bare for form in (secret, inner, json.dumps(inner)[1:-1]))
