"""The steps of the demo plan: small programs that need only Python."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import shutil
import subprocess
import sys
import tempfile
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

WINDOW = 8
"""Number of equal consecutive lines that count as shared."""


def sources(folder: str) -> list[Path]:
    """The Python files below a folder."""
    return sorted(Path(folder).rglob("*.py"))


def text_of(path: Path) -> str:
    """The text of a source file, with bytes that are not UTF-8 replaced."""
    return path.read_text(encoding="utf-8", errors="replace")


def verify(archive: str, folder: str) -> None:
    """Unpack an archive, and compare its files with those of a folder."""
    with tempfile.TemporaryDirectory() as place:
        if archive.endswith(".zpaq"):
            subprocess.run(["zpaq", "extract", str(Path(archive).resolve())], cwd=place, check=True)
        else:
            shutil.unpack_archive(archive, place)
        wrong = [path for path in sources(folder) if digest(path) != digest(Path(place, path))]
    if wrong:
        sys.exit(f"{len(wrong)} files differ from those in {archive}, such as {wrong[0]}")
    print(f"{len(sources(folder))} files compared")


def digest(path: Path) -> str:
    """The SHA-256 of a file; empty if the file is missing."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def non_ascii(folder: str) -> None:
    """Print the names of files with non-ASCII characters."""
    for path in sources(folder):
        if not path.read_bytes().isascii():
            print(path)


def characters(folder: str) -> None:
    """Print the most frequent non-ASCII characters as a table."""
    counts = Counter(
        itertools.chain.from_iterable(
            filter(str.isprintable, text_of(path)) for path in sources(folder)
        )
    )
    beyond = [
        (character, count) for character, count in counts.most_common() if not character.isascii()
    ]
    print("| character | name | count |\n|---|---|---|")
    for character, count in beyond[:10]:
        print(f"| {character} | {unicodedata.name(character, 'unnamed').lower()} | {count} |")


def pairs(folder: str) -> None:
    """Compare every pair of files character by character, and print the similar ones."""
    for one, other in itertools.combinations(sources(folder), 2):
        ratio = difflib.SequenceMatcher(None, text_of(one), text_of(other), autojunk=False).ratio()
        if ratio > 0.8:
            print(f"{ratio:.0%} {one} {other}")


def fingerprints(folder: str) -> None:
    """Find consecutive lines that several files share, by their hashes."""
    found: dict[int, set[Path]] = defaultdict(set)
    for path in sources(folder):
        for window in windows(path):
            found[hash(window)].add(path)
    shared = Counter(
        pair for paths in found.values() for pair in itertools.combinations(sorted(paths), 2)
    )
    for (one, other), count in shared.most_common(5):
        print(f"{count} blocks of {WINDOW} lines: {one} {other}")


def windows(path: Path) -> Iterator[tuple[str, ...]]:
    """Every block of consecutive lines in a file; empty lines do not count."""
    lines = [line.strip() for line in text_of(path).splitlines() if line.strip()]
    return zip(*(lines[start:] for start in range(WINDOW)), strict=False)


def report(build: str, archive: str) -> None:
    """Print a report on the results of the other steps."""
    lines = Path(build, "lines.txt").read_text(encoding="utf-8").splitlines()
    print(
        f"# Report\n\n`{archive}`: {Path(archive).stat().st_size:,} bytes, compared with the sources."
    )
    for title, name in (
        ("Longest files", "lines"),
        ("Most imported", "imports"),
        ("Shared by two files", "duplicates"),
    ):
        found = (
            lines
            if name == "lines"
            else Path(build, f"{name}.txt").read_text(encoding="utf-8").splitlines()
        )
        print(f"\n## {title}\n")
        print("\n".join(f"    {line.strip()}" for line in found[:6]) or "    none")
    beyond = Path(build, "characters.md")
    if beyond.exists():
        print(f"\n## Non-ASCII characters\n\n{beyond.read_text(encoding='utf-8')}", end="")


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr] # it is a text file
    name, *arguments = sys.argv[1:]
    globals()[name.replace("-", "_")](*arguments)
