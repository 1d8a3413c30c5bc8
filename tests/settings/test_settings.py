"""What can be set, within which ranges, and what holds where nothing is set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError

from replanning import Settings
from replanning import settings as public
from replanning.settings import Weights


def test_defaults() -> None:
    """Where nothing is set, the thresholds, limits and times of the specification hold."""
    settings = Settings()
    chosen = settings.alternatives
    assert (chosen.max_count, chosen.min_confidence, chosen.min_llm_confidence) == (3, 0.5, 0.3)
    assert (chosen.human_approval_threshold, chosen.require_approval) == (0.7, False)
    assert (settings.approval.timeout, settings.approval.always_for) == (300.0, ("goal-unreachable",))
    assert (settings.limits.replans_per_lineage, settings.limits.replans_per_run) == (3, None)
    assert (settings.cooldown, settings.better_path.min_gain, settings.retry.max_attempts) == (30.0, 0.15, 3)
    assert "better-path-found" not in settings.triggers


def test_weights() -> None:
    """The weights of a score sum to 1; others are refused with their sum."""
    assert Weights(self_assessment=0.1, past_success=0.2, availability=0.3, simplicity=0.4).simplicity == 0.4
    with pytest.raises(ValidationError, match=r"the weights sum to 1\.2; they must sum to 1"):
        Weights(self_assessment=0.6)


def test_confidence_of_decisions_in_order() -> None:
    """The confidence at which a person is asked cannot be above that at which is acted; all three are named."""
    section = {"llm_decision": {"user_confirmation_threshold": 0.6}}
    with pytest.raises(ValidationError, match=r"user_confirmation_threshold <= .*, got 0\.6, 0\.5, 0\.8"):
        Settings.model_validate({"planning": {"replanning": section}})


@pytest.mark.parametrize("given", ["repair", ["repair"], ("repair",)])
def test_one_name_or_several(given: object) -> None:
    """A single provider may stand for a list of one."""
    assert Settings.model_validate({"provider": given}).provider == ("repair",)


@pytest.mark.parametrize(
    "wrong",
    [
        {"provider": []},
        {"provider": 5},
        {"colour": "red"},
        {"alternatives": {"min_confidence": 1.1}},
        {"approval": {"timeout": 0}},
        {"cooldown": float("inf")},
        {"limits": {"replans_per_lineage": -1}},
        {"triggers": ["full-moon"]},
        {"on_store_failure": "ignore"},
        {"llm": {"prices": {"m": {"input": -1, "output": 0}}}},
    ],
)
def test_what_cannot_be_set(wrong: dict[str, object]) -> None:
    """A value out of its range, of another type or under an unknown name is refused by name."""
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate(wrong)
    assert caught.value.errors()[0]["loc"][0] == next(iter(wrong))


def test_settings_stay() -> None:
    """Settings do not change under a run; others are made from them."""
    settings = Settings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.cooldown = 1.0
    assert settings.model_copy(update={"cooldown": 1.0}) == Settings(cooldown=1.0)


def test_every_section_has_a_public_name() -> None:
    """Whatever a setting is made of can be imported from `replanning.settings`."""
    sections = {kind.__name__ for kind in _sections(Settings)}
    assert sections - {"Retry", "Budget"} <= set(vars(public))


def _sections(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for field in kind.model_fields.values():
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield part
                yield from _sections(part)
