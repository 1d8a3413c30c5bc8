"""Downloads the published data: each source file at its commit, with its checksum, then converts it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import httpx
from pydantic import TypeAdapter

from benchmarks.instances import SHARED
from benchmarks.published import CONVERTERS

HOST: Final = "https://raw.githubusercontent.com"
FETCHED: Final = Path(__file__).parent / "data"
CATALOGUE: Final = Path(__file__).parent / "sources.json"

Say = Callable[[str], None]


class FetchError(Exception):
    """A file could not be downloaded; the downloaded ones are kept."""


@dataclass(frozen=True)
class Source:
    """A published file."""

    repository: str
    commit: str
    path: str
    size: int
    sha256: str

    def address(self, host: str) -> str:
        """Address of the source."""
        return f"{host.rstrip('/')}/{self.repository}/{self.commit}/{self.path}"


@dataclass(frozen=True)
class Dataset:
    """Published files that one of our files is made from."""

    form: Literal["planbench", "workflows"]
    repository: str
    commit: str
    files: tuple[tuple[str, int, str], ...]

    def sources(self) -> Iterator[Source]:
        """Each of them."""
        return (Source(self.repository, self.commit, *file) for file in self.files)


def catalogue(path: Path = CATALOGUE) -> dict[str, Dataset]:
    """Return the available sources, by the names of our files."""
    return TypeAdapter(dict[str, Dataset]).validate_json(path.read_bytes())


def fetch(
    folder: Path = FETCHED,
    *,
    host: str = HOST,
    wanted: Mapping[str, Dataset] | None = None,
    report: Say = lambda line: None,
) -> list[Path]:
    """Download the missing files, and convert them to ours.

    What was fetched before, also a part of a file, is not fetched again.

    Args:
        folder: where our files go; those that they are made of are kept below it until they are.
        host: where the repositories are, each at `OWNER/NAME/COMMIT/PATH`.
        wanted: what to get, instead of everything.
        report: told how it proceeds.

    Returns:
        Our files.

    Raises:
        FetchError: a file cannot be had, or is another one than it was.
    """
    datasets = catalogue() if wanted is None else wanted
    missing = {name: dataset for name, dataset in datasets.items() if not (folder / name).exists()}
    with httpx.Client(timeout=30, follow_redirects=True) as client:
        for name, dataset in missing.items():
            files = []
            count = len(dataset.files)
            total = sum(size for _, size, _ in dataset.files)
            report(
                f"{name}: {count} file{'s' * (count != 1)} of {dataset.repository}, {total / 1e6:.1f} MB"
            )
            for number, source in enumerate(dataset.sources(), 1):
                files.append((source.path, _have(client, source, folder, host)))
                report(f"  {number}/{count} {source.path}")
            _write(folder / name, _converted(name, dataset, files))
            for source in dataset.sources():
                _kept(source, folder).unlink()
    return [folder / name for name in datasets]


def _converted(name: str, dataset: Dataset, files: list[tuple[str, bytes]]) -> bytes:
    try:
        return CONVERTERS[dataset.form](files)
    except ValueError as error:
        raise FetchError(f"{name} cannot be made of what was fetched: {error}") from error


def _kept(source: Source, folder: Path) -> Path:
    return folder / "sources" / f"{source.sha256}.json"


def _have(client: httpx.Client, source: Source, folder: Path, host: str) -> bytes:
    """A published file, from where it is kept or from where it is published."""
    kept = _kept(source, folder)
    part = kept.with_suffix(".part")
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        _download(client, source.address(host), part, source.size)
        text = part.read_bytes()
        if hashlib.sha256(text).hexdigest() != source.sha256:
            part.unlink()
            raise FetchError(
                f"{source.address(host)} is not the file that it was: {len(text)} bytes instead of {source.size}, or other"
                " ones; what came was removed"
            )
        part.replace(kept)
    return kept.read_bytes()


def _download(client: httpx.Client, address: str, part: Path, size: int) -> None:
    """Download the missing part of a file, up to its expected size."""
    there = part.stat().st_size if part.exists() else 0
    if there >= size:
        return
    headers = {"Range": f"bytes={there}-"} if there else {}
    try:
        with client.stream("GET", address, headers=headers) as response:
            response.raise_for_status()
            goes_on = response.status_code == httpx.codes.PARTIAL_CONTENT
            with part.open("ab" if goes_on else "wb") as file:
                for chunk in response.iter_bytes():
                    file.write(chunk)
                    if file.tell() > size:
                        break
    except httpx.HTTPStatusError as error:
        raise FetchError(
            f"{address} answers {error.response.status_code} {error.response.reason_phrase}"
        ) from error
    except httpx.HTTPError as error:
        raise FetchError(
            f"{address} cannot be reached: {str(error) or type(error).__name__}; the data needs a network once. What came so"
            " far is kept: call it again to go on"
        ) from error


def _write(path: Path, text: bytes) -> None:
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(text)
    new.replace(path)


def known(folder: Path) -> bool:
    """Return whether a folder holds published data."""
    return folder in (SHARED, FETCHED)


def at_hand() -> Path:
    """Return the folder of the published data, which may be missing."""
    return SHARED if SHARED.exists() else FETCHED
