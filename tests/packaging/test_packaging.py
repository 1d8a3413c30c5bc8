"""The built distributions: what is in them, and what is not."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAMILIES = ("providers", "triggers", "exporters")
# What a build reads, and nothing that an earlier build or run left behind.
SOURCES = (
    "replanning",
    *FAMILIES,
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "NOTICE",
    "MANIFEST.in",
)

pytestmark = [
    pytest.mark.deep,
    pytest.mark.skipif(
        not (ROOT / "LICENSE").exists(), reason="needs the checkout: there is nothing to build here"
    ),
]


def copy_sources(target: Path) -> Path:
    """A pristine copy of what a build reads, links as links."""
    target.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=leave_out)
        else:
            shutil.copy(ROOT / name, target / name)
    return target


def build(source: Path, kind: str) -> Path:
    """Build one distribution of `source` and return its file."""
    out = source.parent / f"{source.name}-{kind}"
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        f"--{kind}",
        "--outdir",
        str(out),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.iterdir())


def names_in(wheel: Path) -> set[str]:
    """The files of the package in a wheel, its metadata left out."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def files_in(source: Path) -> set[str]:
    """The files that a wheel of `source` must hold, under the names they have once installed."""
    core = [
        path for path in (source / "replanning").rglob("*") if not set(path.parts) & set(FAMILIES)
    ]
    families = [path for family in FAMILIES for path in (source / family).rglob("*")]
    found = {str(path.relative_to(source)) for path in core if path.is_file()}
    return found | {f"replanning/{path.relative_to(source)}" for path in families if path.is_file()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources as a fresh checkout has them."""
    return copy_sources(tmp_path_factory.mktemp("fresh") / "checkout")


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """A wheel built from a fresh checkout."""
    return build(source, "wheel")


def test_wheel_holds_everything(source, wheel):
    """The wheel holds every file of core and families as parts of `replanning`, its licence, and all entry points."""
    names = names_in(wheel)
    assert files_in(source) == names
    assert {
        "replanning/py.typed",
        *(f"replanning/{family}/__init__.py" for family in FAMILIES),
    } <= names
    assert {name.split("/")[0] for name in names} == {"replanning"}
    with zipfile.ZipFile(wheel) as archive:
        metadata = {
            name.split(".dist-info/")[1]: name
            for name in archive.namelist()
            if ".dist-info/" in name
        }
        points = archive.read(metadata["entry_points.txt"]).decode()
    assert {"licenses/LICENSE", "licenses/NOTICE"} <= metadata.keys()
    assert {f"[replanning.{group}]" for group in (*FAMILIES, "stores")} <= set(points.splitlines())


def test_checkout_without_links(wheel, tmp_path):
    """A checkout whose file system knows no links builds the same wheel."""
    bare = copy_sources(tmp_path / "checkout")
    for family in FAMILIES:
        (bare / "replanning" / family).unlink()

    assert names_in(build(bare, "wheel")) == names_in(wheel)


def test_sdist_builds_the_same_wheel(source, wheel, tmp_path):
    """The source distribution holds all that is needed to build the same wheel, and each module once."""
    with tarfile.open(build(source, "sdist")) as archive:
        names = archive.getnames()
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()

    assert not [
        name
        for name in names
        if name.split("/")[1:3] in [["replanning", family] for family in FAMILIES]
    ]
    assert names_in(build(unpacked, "wheel")) == names_in(wheel)
