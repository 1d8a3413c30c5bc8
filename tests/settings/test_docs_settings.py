"""The page about settings names them all, with their defaults."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from replanning import ReplanningEngine, Settings
from replanning.config import load_settings

PAGE = Path(__file__).parents[2] / "docs/reference/settings.md"
TEXT = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
ROWS = dict(re.findall(r"^\| `([a-z_.]+)` \| (.*?) \|", TEXT, flags=re.MULTILINE))
LATER_TRIGGERS = ("goal-unreachable", "resource-changed")
SAID_IN_WORDS = {"triggers", "provider", "approval.on_timeout", "approval.always_for"}

pytestmark = pytest.mark.skipif(not TEXT, reason="needs the checkout: the page is not installed")


def defaults(section: BaseModel, lead: str = "") -> Iterator[tuple[str, str]]:
    """Every setting by its name in the file, with its default as the page writes it."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        key = f"{lead}{name}".replace("retry.exponential", "retry.exponential_backoff")
        key = key.replace("replanning.overall", "replanning.global")
        if isinstance(value, BaseModel):
            yield from defaults(value, f"{key}.")
        elif value is None or value in ((), {}):
            yield key, "none"
        else:
            yield key, f"`{value if isinstance(value, str) else json.dumps(value)}`"


def test_every_setting_is_on_the_page():
    """No setting is missing, none is made up, and each has its default beside it."""
    expected = dict(defaults(Settings()))
    assert ROWS.keys() == expected.keys()
    assert Settings().triggers == (
        "task-failed",
        "timeout",
        "context-changed",
        "human-request",
        *LATER_TRIGGERS,
    )
    assert (Settings().provider, Settings().approval.on_timeout) == (("auto",), None)
    assert Settings().approval.always_for == ("goal-unreachable",)
    for key in expected.keys() - SAID_IN_WORDS:
        assert (key, ROWS[key]) == (key, expected[key])


def test_file_and_program_of_the_page(tmp_path):
    """The file on the page is valid, and so is the program."""
    (tmp_path / "settings.yaml").write_text(
        re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)[0]
    )
    loaded = load_settings(tmp_path / "settings.yaml", environ={}).settings
    assert (
        loaded.limits.replans_per_run,
        loaded.cooldown,
        loaded.alternatives.require_approval,
    ) == (5, 5, True)
    names: dict[str, object] = {}
    exec(re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)[0], names)
    assert names["settings"] == Settings.model_validate(
        {"alternatives": {"require_approval": True}, "cooldown": 5}
    )


def test_loaded_settings_are_taken(tmp_path):
    """An engine takes what was loaded, a mapping and settings alike."""
    (tmp_path / "settings.yaml").write_text("replanning: {cooldown: 5}\n")
    loaded = load_settings(tmp_path / "settings.yaml", environ={})
    for given in (loaded, loaded.settings, {"cooldown": 5}):
        assert ReplanningEngine(settings=given).settings == loaded.settings


def test_variables_of_the_page(tmp_path):
    """Every variable that the page names for a setting is read."""
    wanted = set(re.findall(r"`(REPLANNING_[A-Z_]+)`", TEXT)) - {"REPLANNING_STORE"}
    values = {
        "_ENABLED": "false",
        "_OLLAMA": "true",
        "_BASE_URL": "http://localhost:1/v1",
        "_MAX_TOKENS": "7",
    }
    values["_OVERRIDE_URL"] = (
        "http://localhost:1/settings"  # nobody answers there, which stops nothing
    )
    given = {
        name: next((v for end, v in values.items() if name.endswith(end)), "0.6") for name in wanted
    }
    (tmp_path / "none.yaml").write_text("replanning: {}\n")
    sources = load_settings(tmp_path / "none.yaml", environ=given).sources
    assert {source.removeprefix("environment ") for source in sources.values()} == wanted
