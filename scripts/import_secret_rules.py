"""Write the rules that find secrets by their format, from a pinned release of gitleaks.

    python scripts/import_secret_rules.py [gitleaks.toml]

Without an argument, the file of that release is downloaded. What concerns files and commits is left out.
"""

import hashlib
import json
import sys
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

VERSION = "v8.30.1"
SHA256 = "e163e53b9e7e8a8511e77271e2b323ed057759542a6d988258afe3a1fa329caf"
SOURCE = f"https://raw.githubusercontent.com/gitleaks/gitleaks/{VERSION}/config/gitleaks.toml"
TARGET = Path(__file__).parents[1] / "replanning/plan/secret_rules.json"

_LITERAL_KEYS = "gcp-api-key"
"""Its allowlist spells out keys, which other scanners would report in this repository."""


def allowlist(given: dict[str, Any]) -> dict[str, Any] | None:
    """Return the texts that an allowlist excludes; None if that depends on a file."""
    if not given.keys() & {"regexes", "stopwords"} or (
        given.get("condition") == "AND" and "paths" in given
    ):
        return None
    return {
        "target": given.get("regexTarget", "secret"),
        "regexes": given.get("regexes", []),
        "stopwords": given.get("stopwords", []),
    }


def rule(given: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a rule that concern text."""
    lists = (
        []
        if given["id"] == _LITERAL_KEYS
        else [allowlist(each) for each in given.get("allowlists", ())]
    )
    return {
        "id": given["id"],
        "regex": given["regex"],
        "keywords": given["keywords"],
        "entropy": given.get("entropy", 0),
        "group": given.get("secretGroup", 0),
        "allowed": [each for each in lists if each is not None],
    }


def main() -> None:
    """Check the input against the pinned hash, and write the rules, one a line."""
    if len(sys.argv) > 1:
        text = Path(sys.argv[1]).read_bytes()
    else:
        with urllib.request.urlopen(SOURCE, timeout=60) as answer:
            text = answer.read()
    if (found := hashlib.sha256(text).hexdigest()) != SHA256:
        sys.exit(f"the file is not that of {VERSION}: its SHA-256 is {found}, expected {SHA256}")
    collection = tomllib.loads(text.decode())
    head = {
        "source": SOURCE,
        "sha256": SHA256,
        "license": "MIT, Copyright (c) 2019 Zachary Rice",
        "allowed": [allowlist(collection["allowlist"])],
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    rules = [f"  {json.dumps(rule(each))}" for each in collection["rules"] if "regex" in each]
    lines.append(' "rules": [\n' + ",\n".join(rules) + "\n ]")
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
