"""Processes that are killed in planning mode, and resumed by others."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.support.coding import RIGHT, commits
from tests.support.planning_crash import KILLS_PER_RUN, Campaign, charged, kept, retries, story, told

KILLS = 20


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """A run that is killed repeatedly keeps counts, budget, question and plan, repeats nothing, and ends as usual."""
    campaign = Campaign(tmp_path, Random(20_240_229))
    undisturbed, records = campaign.play("undisturbed", 0)
    expected = story(records, tmp_path / "undisturbed")
    assert (undisturbed["status"], undisturbed["differences"]) == ("succeeded", []), undisturbed
    while campaign.kills < KILLS:
        name = f"run-{campaign.runs}"
        said, records = campaign.play(name, min(KILLS_PER_RUN, KILLS - campaign.kills))
        assert (said["status"], said["reason"], said["differences"]) == ("succeeded", undisturbed["reason"], [])
        assert story(records, tmp_path / name) == expected
        assert told(tmp_path / name) == told(tmp_path / "undisturbed")
        assert kept(tmp_path / name) == ["plan", "revision", "completion"]
        followed, failed = retries(records)
        assert followed == failed
        assert said["calls"] == charged(records)
        assert (tmp_path / name / "work/sums.py").read_text() == RIGHT
        assert commits(tmp_path / name / "work") == ["Add sums"]
    assert campaign.kills == KILLS
