"""Settings: where they come from, which goes before which, what they may be, and how wrong ones are told."""

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from replanning import Settings
from replanning.config import OTHERS, VARIABLES, LoadedSettings, keys, load_settings, values
from replanning.errors import ReplanningError, SettingsError
from replanning.settings import PlanningReplanSettings, PriceSettings
from tests.support.http_server import HttpServer

PACKAGE = Path(__file__).parents[2] / "replanning"
FILE = "replanning.yaml"
FORM = 'expected {"status": "success", "data": {"planning": {…}}}'


pytestmark = pytest.mark.usefixtures("in_folder")


def load(section: str = "", **given: Any) -> LoadedSettings:
    """The settings of a file with this section, and of other sources; of an empty environment, if none is given."""
    if section:
        lines = "".join(f"  {line}\n" for line in section.splitlines())
        Path(FILE).write_text(f"replanning:\n{lines}", encoding="utf-8")
        given.setdefault("path", FILE)
    return load_settings(**{"environ": {}, **given})


def problems(section: str = "", **given: Any) -> list[str]:
    """Everything that is wrong with settings."""
    with pytest.raises(SettingsError) as caught:
        load(section, **given)
    return [str(problem) for problem in caught.value.problems]


def server(body: bytes, status: int = 200) -> HttpServer:
    """A real server that answers every request alike, and with another address for redirects."""
    return HttpServer(lambda request: (status, {"location": "/elsewhere"}, body))


def own(**planning: Any) -> dict[str, Any]:
    """What a function or server answers for a person with these settings."""
    return {"status": "success", "data": {"planning": planning}}


def from_server(address: str, **more: str) -> LoadedSettings:
    """The settings with those of a server."""
    return load(environ={"REPLANNING_OVERRIDE_URL": address, **more})


def test_file_is_found_where_the_program_runs():
    """`replanning.yaml` and `.replanning.yaml` are found by themselves; both at once are an error."""
    Path(".replanning.yaml").write_text("replanning: {cooldown: 5}")
    hidden = load()
    assert (hidden.settings.cooldown, hidden.sources) == (5, {"cooldown": ".replanning.yaml:1:14"})
    os.mkfifo(FILE)
    with pytest.raises(SettingsError, match="keep one of them"):
        load()
    Path(".replanning.yaml").unlink()
    with pytest.raises(
        SettingsError,
        match=f"{FILE}: the settings file cannot be read: it is a named pipe; give a file",
    ):
        load()


def test_zero_is_zero():
    """A weight, threshold or limit of 0 is 0 and not the default (defects 9 and 10)."""
    section = "weights: {past_success: 0, self_assessment: 0.7}\nalternatives: {min_confidence: 0}\ncooldown: 0"
    settings = load(f"{section}\nlimits: {{replans_per_run: 0}}").settings
    assert (settings.weights.past_success, settings.alternatives.min_confidence) == (0, 0)
    assert (settings.limits.replans_per_run, settings.cooldown) == (0, 0)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("enabled: maybe", "2:3 enabled: expected true or false, got 'maybe'"),
        ("cooldown: true", "2:3 cooldown: expected a number of at least 0, got True"),
        ("cooldown: '5'", "2:3 cooldown: expected a number of at least 0, got '5'"),
        (
            "cooldown: sk-abcdefghijklmnopqrstuvwx",
            "2:3 cooldown: expected a number of at least 0, got '[redacted]'",
        ),
        (
            "alternatives:\n  max_count: 2.5",
            "3:5 alternatives.max_count: expected a whole number from 1 to 20, got 2.5",
        ),
        (
            "retry: {exponential_backoff: 2}",
            "2:11 retry.exponential_backoff: expected true or false, got 2",
        ),
        (
            "approval: {on_timeout: panic}",
            "2:14 approval.on_timeout: expected one of abort, skip, continue, pause or null, got 'panic'",
        ),
        ("provider: []", "2:3 provider: expected a list of text, at least one, got ()"),
        (
            "triggers: [timeout, earthquake]",
            "2:3 triggers: there is no detector with this name; known detectors are task-failed, timeout, context-changed",
        ),
        (
            "limits: 3",
            "2:3 limits: expected a section with replans_per_lineage, replans_per_run, got 3",
        ),
        (
            "colour: red",
            "2:3 colour: there is no such setting; known settings are enabled, provider, triggers,",
        ),
        ("cool_down: 3", "2:3 cool_down: there is no such setting; did you mean 'cooldown'?"),
        (
            "retry: {exponential: true}",
            "2:11 retry.exponential: there is no such setting; did you mean 'retry.exponential_backoff'?",
        ),
        ("weights: {simplicity: 0.5}", "2:13 weights: the weights sum to 1.4; they must sum to 1"),
        (
            "effects: {ask_before: [none]}",
            "2:13 effects.ask_before: expected a list of one of reversible, partly, irreversible, got 'none'",
        ),
        ("llm: {prices: [1]}", "2:9 llm.prices: expected a mapping by name, got [1]"),
    ],
)
def test_wrong_value(section, message):
    """A wrong value is told with its place, its key, what is allowed and what was given."""
    (found,) = problems(section)
    assert found.startswith(f"{FILE}:{message}")


@pytest.mark.parametrize(
    "section",
    ["api_key: {}", "openai:\n  api_key: {}", "anthropic_api_key: {}", "llm: {{token: {}}}"],
)
def test_keys_stay_out_of_files(section):
    """A key of an API service in the file is an error that names it and does not repeat it."""
    (found,) = problems(section.format("hunter2hunter2"))
    assert "keys of API services come from the environment alone" in found
    assert "hunter2" not in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", None),
        ("replanning:\n", None),
        ("replanning: {limits: }\n", None),
        ("- 1\n", "expected a mapping with the section 'replanning'"),
        ("replanning: [1]\n", "expected a mapping of settings, got [1]"),
        ("replanning: {a: &x [1], b: *x, a: 2}\n", "a"),
        ("replanning: {cooldown: [", FILE),
        ("\x00", FILE),
        ("#" * (1024 * 1024 + 1), "larger than"),
        ("\udcfc: 1", "byte 1 of the file is not UTF-8"),
    ],
)
def test_hostile_files(text, message):
    """Files that are empty, malformed or something else are taken as empty, or refused with a sentence."""
    Path(FILE).write_bytes(os.fsencode(text))
    if message is None:
        assert load().settings == Settings()
    else:
        assert message in "; ".join(problems())


def test_files_that_cannot_be_read():
    """A file that was named and is missing, or a folder, is refused."""
    for name, message in (("none.yaml", "No such file"), ("", "cannot be read")):
        with pytest.raises(SettingsError, match=message):
            load_settings(name, {})


def test_prices():
    """Prices go by the names of models, which may hold dots, and stay whole from file to arguments."""
    loaded = load(
        "llm:\n  prices:\n    gpt-4.1: {input: 2, output: 8}\n    'own-*': {input: 0, output: 0}"
    )
    assert loaded.settings.llm.prices == {
        "gpt-4.1": PriceSettings(input=2, output=8),
        "own-*": PriceSettings(input=0, output=0),
    }
    assert loaded.sources == {"llm.prices": f"{FILE}:3:5"}
    assert (
        load(arguments={"llm.prices": {"o3": {"input": 1, "output": 2}}})
        .settings.llm.prices["o3"]
        .output
        == 2
    )
    assert load("llm:\n  prices:").settings.llm.prices == {}


def test_wrong_prices():
    """A wrong price is told with the model that it is of."""
    section = """\
llm:
  prices:
    gpt-4.1: {input: -2, output: 8}
    gpt-4.2: {input: 2}
    gpt-4.3: {input: 2, output: 8, cached: 1}
    gpt-4.4: 7"""
    assert problems(section) == [
        f"{FILE}:3:5 llm.prices gpt-4.1 input: expected a number of at least 0, got -2",
        f"{FILE}:3:5 llm.prices gpt-4.2 output: it is missing",
        f"{FILE}:3:5 llm.prices gpt-4.3 cached: there is no such setting",
        f"{FILE}:3:5 llm.prices gpt-4.4: expected a section with input, output, got 7",
    ]


NO_ADDRESS = (
    "expected an address that begins with http:// or https://, such as http://localhost:8000/v1"
)
MORE = "it holds more than an address: names, passwords and keys do not belong here; keys come from the environment alone"
INSECURE = "expected an address that begins with https://; http:// only on this machine (localhost)"


@pytest.mark.parametrize(
    ("key", "address", "message", "shown"),
    [
        ("llm.base_url", "https://me:hunter22@host/v1", MORE, "https://me:[redacted]@host/v1"),
        (
            "llm.base_url",
            "https://sk-abcdefghijklmnopqrstuv@host/v1",
            MORE,
            "https://[redacted]@host/v1",
        ),
        (
            "llm.base_url",
            "https://host/v1?api_key=abcdef123456",
            MORE,
            "https://host/v1?api_key=[redacted]",
        ),
        ("override.url", "https://eve:hunter22@host/x", MORE, "https://eve:[redacted]@host/x"),
        (
            "override.url",
            "https://host/x?token=abcdefgh1234",
            MORE,
            "https://host/x?token=[redacted]",
        ),
        ("override.url", "http://host.example/x", INSECURE, "http://host.example/x"),
        ("override.url", "http://localhost.example/x", INSECURE, "http://localhost.example/x"),
        ("override.url", "ftp://localhost/x", NO_ADDRESS, "ftp://localhost/x"),
        *(
            ("llm.base_url", address, NO_ADDRESS, address)
            for address in (
                "localhost:8000",
                "ftp://host/v1",
                "http://",
                "http://[::1",
                "http://host:99999",
            )
        ),
    ],
)
def test_wrong_address(key, address, message, shown):
    """What is no address, or more than one, is refused without its secret; settings of a person come by a safe way."""
    (told,) = problems(arguments={key: address})
    assert told == f"argument {key}: {message}; got {shown!r}"
    section, name = key.split(".")
    with pytest.raises(SettingsError) as caught:
        Settings.model_validate({section: {name: address}})
    (problem,) = caught.value.problems
    assert str(problem) == f"Settings.{key}: {message}, got {shown!r}"


@pytest.mark.parametrize("address", ["http://host/trace", "javascript:alert('{trace_id}')"])
def test_wrong_address_of_traces(address):
    """Traces are linked by an address of the web that has their id."""
    (told,) = problems(arguments={"trace_url": address})
    assert (
        "expected the address of a trace, such as http://localhost:16686/trace/{trace_id}" in told
    )


@pytest.mark.parametrize(
    "address", ["http://localhost:11434", "https://host.example/v1/", "http://[::1]:8000/v1", None]
)
def test_address(address):
    """Addresses of web servers are taken, and none."""
    assert load(arguments={"llm.base_url": address}).settings.llm.base_url == address


# Which goes before which

ORDER = ("file", "override", "environment", "argument")


@given(st.dictionaries(st.sampled_from(ORDER), st.integers(1, 10_000)), st.booleans())
def test_order_of_all_sources(tmp_path_factory, said, other):
    """Whatever sources say of a setting: argument, environment, override, file, default, the first that says it counts."""
    file = tmp_path_factory.mktemp("order") / "s.yaml"
    lines = [f"  max_subtasks: {said['file']}"] if "file" in said else []
    file.write_text("\n".join(["planning:", *lines, *(["  strategy: simple"] if other else [])]))
    loaded = load_settings(
        file,
        {"PLANNING_MAX_SUBTASKS": str(said["environment"])} if "environment" in said else {},
        arguments={"planning.max_subtasks": said["argument"]} if "argument" in said else {},
        override=lambda: own(**({"max_subtasks": said["override"]} if "override" in said else {})),
    )
    first = next((kind for kind in reversed(ORDER) if kind in said), "default")

    assert loaded.kind("planning.max_subtasks") == first
    assert loaded.settings.planning.max_subtasks == said.get(first, 100)
    assert loaded.settings.planning.strategy == ("simple" if other else "chain_of_thought")


def test_lists_of_a_higher_source_replace():
    """A list of a higher source stands in place of a lower one's; no item of that is left (defect 4)."""
    loaded = load(
        "provider: [one, two]\nllm: {fallback: [three, four]}\ntriggers: [timeout]\napproval: {always_for: []}",
        environ={"REPLANNING_PROVIDER": "five"},
        arguments={"llm.fallback": []},
    )
    assert (loaded.settings.provider, loaded.settings.llm.fallback) == (("five",), ())
    assert (loaded.settings.triggers, loaded.settings.approval.always_for) == (("timeout",), ())


# Names and ranges


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("REPLANNING_ENABLED", "off", "enabled", False),
        ("REPLANNING_ENABLED", "Yes", "enabled", True),
        ("REPLANNING_MIN_CONFIDENCE", "0", "alternatives.min_confidence", 0),
        ("MAX_TOTAL_REPLANS", "4", "planning.replanning.global.max_total_replans", 4),
        ("PLANNING_ENABLED", "false", "planning.enabled", False),
        ("PLANNING_STRATEGY", "hierarchical", "planning.strategy", "hierarchical"),
        ("PLANNING_MAX_SUBTASKS", "7", "planning.max_subtasks", 7),
        ("REFLECTION_ENABLED", "false", "planning.reflection.enabled", False),
        ("REFLECTION_INTERVAL", "0", "planning.reflection.trigger_interval", 0),
        ("MAX_PLAN_REVISIONS", "1", "planning.revision.max_revisions", 1),
        ("REPLANNING_PROVIDER", "repair", "provider", ["repair"]),
        ("REPLANNING_APPROVAL_THRESHOLD", "0.9", "alternatives.human_approval_threshold", 0.9),
        ("MUSUBI_REPLAN_ENABLED", "0", "enabled", False),
        ("MUSUBI_LLM_PROVIDER", "openai, repair", "provider", ["openai", "repair"]),
        ("MUSUBI_REPLAN_MIN_CONFIDENCE", "0.9", "alternatives.human_approval_threshold", 0.9),
        ("REPLANNING_LLM_MODEL", "gpt-4.1", "llm.model", "gpt-4.1"),
        ("REPLANNING_LLM_TEMPERATURE", "0.7", "llm.temperature", 0.7),
        ("REPLANNING_LLM_MAX_TOKENS", "500", "llm.max_tokens", 500),
        (
            "REPLANNING_LLM_BASE_URL",
            "http://localhost:8000/v1",
            "llm.base_url",
            "http://localhost:8000/v1",
        ),
        ("REPLANNING_LLM_FALLBACK", "anthropic, ollama", "llm.fallback", ["anthropic", "ollama"]),
        ("REPLANNING_LLM_OLLAMA", "yes", "llm.ollama", True),
    ],
)
def test_variables(name, text, key, value):
    """Every short variable sets its settings, goes before the file, and is named as their source."""
    loaded = load("llm: {model: other}\nenabled: true", environ={name: text})
    every = dict.fromkeys([key for short, key in VARIABLES if short == name], value)
    assert loaded.settings == load(arguments=every).settings
    assert key in every
    assert {loaded.sources[key] for key in every} == {f"environment {name}"}


@pytest.mark.parametrize(
    ("text", "bands"),
    [("0.2", (0.2, 0.2, 0.8)), ("0.6", (0.3, 0.6, 0.8)), ("1", (0.3, 1, 1)), ("0", (0, 0, 0.8))],
)
def test_the_minimum_alone_sets_the_decision_of_planning_mode(text, bands):
    """REPLANNING_MIN_CONFIDENCE is the minimum of planning mode as well; thresholds that are not set follow it."""
    decision = load(
        environ={"REPLANNING_MIN_CONFIDENCE": text}
    ).settings.planning.replanning.llm_decision
    assert decision.min_confidence_threshold == bands[1]
    assert (decision.user_confirmation_threshold, decision.immediate_execution_threshold) == (
        bands[0],
        bands[2],
    )
    stated = {"planning.replanning.llm_decision.immediate_execution_threshold": 0.5}
    limits = load(
        environ={"REPLANNING_ENABLED": "off"}, arguments=stated
    ).settings.planning.replanning
    assert (limits.enabled, limits.llm_decision.immediate_execution_threshold) == (False, 0.5)


# What a setting of this kind may be, beside its default: as text of a variable, and as it is then.
OTHERWISE = (
    ("0.7", 0.7),
    ("7", 7),
    ("off", False),
    ("on", True),
    ("timeout, task-failed", ["timeout", "task-failed"]),
)
OF_ITS_OWN = {
    "provider": ("a, b", ["a", "b"]),
    "override.url": ("http://localhost:1/settings", "http://localhost:1/settings"),
    "llm.base_url": ("http://localhost:1/v1", "http://localhost:1/v1"),
    "trace_url": ("http://localhost:1/{trace_id}", "http://localhost:1/{trace_id}"),
    "llm.prices": ('{"o3.X": {"input": 1, "output": 2.5}}', {"o3.X": {"input": 1, "output": 2.5}}),
    "budget.money": ("null", None),
    "redaction.patterns": (r"card-\d{2,4}", [r"card-\d{2,4}"]),
    "judge.timeout_seconds": ("100", 100),
}


@pytest.mark.parametrize("key", [key for key, is_section in keys().items() if not is_section])
def test_every_setting_has_a_variable(key):
    """A variable with the long name of a setting says what an argument of that key would, and is named as its source."""
    name = f"REPLANNING_{key.replace('.', '__').upper()}"
    default = values(Settings())[key]
    text = default if isinstance(default, str) else json.dumps(default)
    options = [OF_ITS_OWN[key]] if key in OF_ITS_OWN else [(text, default), *OTHERWISE]
    every = {key, *(one for short, one in VARIABLES if short == name)}
    found = 0
    for text, value in options:
        try:
            same = load(arguments=dict.fromkeys(every, value), override=own)
        except SettingsError:
            continue
        loaded = load(environ={name: text}, override=own)
        assert (loaded.settings, loaded.sources) == (
            same.settings,
            dict.fromkeys(every, f"environment {name}"),
        )
        found += 1
    assert found


def test_sections_from_variables():
    """A section may be one variable with JSON; what is wrong in it is told with the name of that variable."""
    name = "REPLANNING_ALTERNATIVES"
    loaded = load(environ={name: '{"max_count": 4}', f"{name}__MIN_CONFIDENCE": "0.4"})
    assert (
        loaded.settings.alternatives.max_count,
        loaded.settings.alternatives.min_confidence,
    ) == (4, 0.4)
    assert loaded.sources == {
        "alternatives.max_count": f"environment {name}",
        "alternatives.min_confidence": f"environment {name}__MIN_CONFIDENCE",
    }
    deep, whole = "[" * 100_000, '{"a":' * 300 + "1" + "}" * 300
    for text, told in (
        (whole, ": expected a section with max_count, "),
        ('{"max_count": "many"}', ".max_count: expected a whole number from 1 to 20, got 'many'"),
        ('{"nix": 1}', ".nix: there is no such setting; "),
        ("{", ": expected a section with max_count, "),
        (deep, ": expected a section with max_count, "),
    ):
        (problem,) = problems(environ={name: text})
        assert problem.startswith(f"environment {name} alternatives{told}")
    (problem,) = problems(environ={"REPLANNING_LLM__API_KEY": "sk-1234567890"})
    assert problem.startswith(
        "environment REPLANNING_LLM__API_KEY llm.api_key: keys of API services come from the"
    )


def test_patterns_from_a_variable():
    """A pattern is not cut at its commas, with which it would find other things; several stand as JSON."""
    for text, patterns in (
        (r"card-\d{2,4}", (r"card-\d{2,4}",)),
        ('["a{1,2}", "b"]', ("a{1,2}", "b")),
    ):
        loaded = load(environ={"REPLANNING_REDACTION__PATTERNS": text})
        assert loaded.settings.redaction.patterns == patterns


@pytest.mark.parametrize(
    "name", ["REPLANNING_LLM", "REPLANNING_LLM__TEMPERATURE", "REPLANNING_TRIGGERS"]
)
@pytest.mark.parametrize("form", ["{}", '["{}"]', '[{{"password": "{}"}}]'])
def test_no_secret_in_what_is_wrong(name, form):
    """A key that was put where it does not belong is not told, nor a part of it, however long it is."""
    told = "; ".join(problems(environ={name: form.format(f"sk-{'a' * 20}{'b' * 200}")}))
    assert name in told
    assert "bbb" not in told


def test_variables_that_say_nothing():
    """A name that goes deeper than any setting is nobody's; an empty variable gives way to its alias."""
    loaded = load(environ={f"REPLANNING_TIMEOUT{'__X' * 5_000}": "1"})
    assert (loaded.settings, loaded.warnings) == (Settings(), ())
    assert not load(
        environ={"REPLANNING_ENABLED": "", "MUSUBI_REPLAN_ENABLED": "false"}
    ).settings.enabled


@pytest.mark.parametrize(
    ("first", "second", "key"),
    [
        ("MAX_TOTAL_REPLANS", "REPLANNING_PLANNING__REPLANNING__GLOBAL__MAX_TOTAL_REPLANS",
         "planning.replanning.global.max_total_replans"),
        ("REPLANNING_APPROVAL_THRESHOLD", "MUSUBI_REPLAN_MIN_CONFIDENCE", "alternatives.human_approval_threshold"),
    ],
)  # fmt: skip
def test_short_names_go_before_long_ones(first, second, key):
    """Where a setting has several names and all are set, the short one counts, and an alias gives way to it."""
    assert load(environ={first: "1", second: "0"}).sources == {key: f"environment {first}"}


@pytest.mark.parametrize(
    ("key", "inside", "outside", "allowed"),
    [
        ("judge.max_iterations", (1, 10), (0, 11, 1.5), "a whole number from 1 to 10"),
        ("judge.timeout_seconds", (60, 600), (59.9, 600.1), "a number from 60 to 600"),
        ("alternatives.max_count", (1, 20), (0, 21), "a whole number from 1 to 20"),
        ("alternatives.min_confidence", (0, 1), (-0.1, 1.1), "a number from 0 to 1"),
        ("alternatives.human_approval_threshold", (0, 1), (-0.1, 1.1), "a number from 0 to 1"),
        ("retry.max_attempts", (1,), (0,), "a whole number of at least 1"),
        ("retry.delay", (0,), (-1,), "a number of at least 0"),
        ("timeout.task", (0.1,), (0,), "a number above 0"),
        ("llm.temperature", (0, 2), (-0.1, 2.1), "a number from 0 to 2"),
        ("llm.max_tokens", (1,), (0,), "a whole number of at least 1"),
        ("failure_threshold", (1,), (0,), "a whole number of at least 1"),
        ("cooldown", (0,), (-1, float("inf")), "a number of at least 0"),
        ("better_path.min_gain", (0, 1), (-0.1, 1.1), "a number from 0 to 1"),
        ("better_path.every", (1,), (0,), "a whole number of at least 1"),
        ("limits.replans_per_run", (0, None), (-1,), "a whole number of at least 0 or null"),
        (
            "escalation.on_no_alternative",
            ("wait", "assume", "abort", None),
            ("hope",),
            "one of wait, assume, abort",
        ),
        (
            "judge_on",
            ("errors_and_interval", "every_action"),
            ("never",),
            "one of errors_and_interval, every_action",
        ),
        (
            "on_store_failure",
            ("pause", "continue_unjournaled"),
            ("stop",),
            "one of pause, continue_unjournaled",
        ),
        ("planning.max_subtasks", (1,), (0,), "a whole number of at least 1"),
        (
            "planning.strategy",
            ("chain_of_thought", "hierarchical", "simple"),
            ("none",),
            "one of chain_of_thought",
        ),
        (
            "planning.decomposition_level",
            ("detailed", "moderate", "minimal"),
            ("fine",),
            "one of detailed, moderate",
        ),
        (
            "planning.reflection.depth",
            ("deep", "moderate", "shallow"),
            ("none",),
            "one of deep, moderate, shallow",
        ),
        ("planning.reflection.trigger_interval", (0,), (-1,), "a whole number of at least 0"),
        ("planning.history.storage_type", ("jsonl",), ("xml",), "jsonl"),
        ("planning.history.directory", ("here",), ("",), "text that is not empty"),
        ("planning.history.retention_days", (1,), (0,), "a whole number of at least 1"),
        (
            "planning.replanning.global.same_trigger_max_count",
            (1,),
            (0,),
            "a whole number of at least 1",
        ),
        (
            "planning.replanning.llm_decision.min_confidence_threshold",
            (0.3, 0.8),
            (1.1,),
            "a number from 0 to 1",
        ),
    ],
)
def test_ranges(key, inside, outside, allowed):
    """The edges of what is allowed are; beyond them a setting is refused by its key, its source and what is allowed."""
    for value in inside:
        assert load(arguments={key: value}).sources == {key: "argument"}
    for value in outside:
        (problem,) = problems(arguments={key: value})
        assert problem.startswith(f"argument {key}: expected {allowed}")
        assert problem.endswith(f"got {value!r}")


def test_bands_in_order():
    """The bands of confidence stay in order, 0 <= user <= min <= immediate <= 1, whichever sources say them."""
    lead = "planning.replanning.llm_decision"
    asked = own(replanning={"llm_decision": {"min_confidence_threshold": 0.55}})
    (problem,) = problems(
        arguments={f"{lead}.user_confirmation_threshold": 0.6}, override=lambda: asked
    )
    assert problem == (
        f"override, argument {lead}: expected user_confirmation_threshold <= min_confidence_threshold <="
        " immediate_execution_threshold, got 0.6, 0.55, 0.8"
    )


def test_problems_of_every_source_at_once():
    """All sources are looked at before anything is refused, and every problem is told in one error."""
    Path(FILE).write_text(
        "replanning: {cooldown: -1, api_key: x, planning: {enabled: 1}}\nother: {}"
    )
    told = problems(
        environ={"PLANNING_STRATEGY": "wild", "MUSUBI_REPLAN_ENABLED": "perhaps"},
        arguments={"failure_threshold": 0, "llm.model": object()},
        override=lambda: own(max_subtasks=0, stategy="simple"),
    )
    assert sorted(told) == [
        "argument failure_threshold: expected a whole number of at least 1, got 0",
        *(one for one in told if one.startswith("argument llm.model: got <object object at")),
        "environment MUSUBI_REPLAN_ENABLED enabled: expected true or false, got 'perhaps'",
        "environment MUSUBI_REPLAN_ENABLED planning.replanning.enabled: expected true or false, got 'perhaps'",
        "environment PLANNING_STRATEGY planning.strategy: expected one of chain_of_thought, hierarchical, simple, got 'wild'",
        "override planning.max_subtasks: expected a whole number of at least 1, got 0",
        "override planning.stategy: there is no such setting; did you mean 'planning.strategy'?",
        f"{FILE} other: there is no section with this name; the sections are 'replanning' and 'planning'",
        f"{FILE} replanning.planning: it is a section of its own; move it out",
        f"{FILE}:1:14 cooldown: expected a number of at least 0, got -1",
        *(one for one in told if one.startswith(f"{FILE}:1:28 api_key: ")),
    ]
    assert len(told) == 11


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("planning.judge_on", "judge_on"),
        ("max_subtasks", "planning.max_subtasks"),
        ("judge.max_iteration", "judge.max_iterations"),
        ("timeoutSeconds", "judge.timeout_seconds"),
        ("humanApprovalThreshold", "alternatives.human_approval_threshold"),
        ("retry.maxAttempts", "retry.max_attempts"),
    ],
)
def test_setting_of_another_section(key, meant):
    """A setting that stands in the wrong section, or is misspelt, is told with the one that was meant."""
    assert problems(arguments={key: 1}) == [
        f"argument {key}: there is no such setting; did you mean {meant!r}?"
    ]


@pytest.mark.parametrize("key", ["maxIterations", "max_iterations"])
def test_iterations(key):
    """`max_iterations` outside of a section may mean two settings, and both are named with what they limit."""
    (told,) = problems(arguments={key: 3})
    assert "'limits.replans_per_lineage', the replans of a task" in told
    assert "'judge.max_iterations', the attempts at it" in told


def test_settings_stay():
    """Settings do not change under a run; others are made from them."""
    settings = Settings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.cooldown = 1.0
    assert settings.model_copy(update={"cooldown": 1.0}) == Settings(cooldown=1.0)


# Settings of a person


def test_override_by_a_function():
    """A function says what a person has set; what else it says is passed over."""
    answer = own(strategy="simple", reflection={"trigger_interval": 0}) | {"message": "hello"}
    loaded = load(override=lambda: answer)
    assert (
        loaded.settings.planning.strategy,
        loaded.settings.planning.reflection.trigger_interval,
    ) == ("simple", 0)
    assert loaded.sources == {
        "planning.strategy": "override",
        "planning.reflection.trigger_interval": "override",
    }


def test_override_by_a_server():
    """A server of the file, or before it of a variable, is asked once, and what it says counts; a function goes before."""
    with server(json.dumps(own(max_subtasks=5)).encode()) as asked:
        address = f"{asked.url}/users/eve"
        by_file = load(f"override: {{url: '{address}', timeout: 9}}")
        assert load(path=FILE, override=own).settings.planning.max_subtasks == 100
        by_variable = load(path=FILE, environ={"REPLANNING_OVERRIDE_URL": f"{address}/other"})
    assert [request.path for request in asked.requests] == ["/users/eve", "/users/eve/other"]
    assert by_file.settings.planning.max_subtasks == by_variable.settings.planning.max_subtasks == 5
    assert by_file.sources["planning.max_subtasks"] == f"override {address}"
    assert (by_file.kind("planning.max_subtasks"), by_file.warnings) == ("override", ())


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        ({"status": "error", "message": "no"}, "got status 'error'"),
        ({"status": "success"}, "got {'status': 'success'}"),
        ({"status": "success", "data": {"planing": {}}}, "got data with 'planing' in it"),
        ({"status": "success", "data": {"planning": [1]}}, "got data with 'planning' in it"),
        ({"status": "success", "data": None}, "got {"),
        ({"data": {"planning": {}}}, "got {'data'"),
        ([], "got []"),
        (None, "got None"),
        ({"status": "sk-abcdefghijklmnopqrstuvwx"}, "got status '[redacted]'"),
    ],
)
def test_override_of_another_form(answer, got):
    """An answer of another form is one error that says what was expected and what came, from a function or a server."""
    (told,) = problems(override=lambda: answer)
    assert told.startswith(f"override: {FORM}, {got}")
    with server(json.dumps(answer).encode()) as asked:
        (told,) = problems(environ={"REPLANNING_OVERRIDE_URL": asked.url})
    assert told.startswith(f"override {asked.url}: {FORM}")


@pytest.mark.parametrize("data", [{}, {"llm": {"model": "x"}}, {"theme": "dark"}])
def test_person_without_settings_for_planning(data):
    """Settings of a person without a section for planning mode are no override, from a function or a server."""
    answer = {"status": "success", "data": data}
    loaded = load(override=lambda: answer, environ={"PLANNING_STRATEGY": "simple"})
    with server(json.dumps(answer).encode()) as asked:
        by_server = from_server(asked.url, PLANNING_STRATEGY="simple")
    for one in (loaded, by_server):
        assert (one.settings.planning.strategy, one.warnings) == ("simple", ())
        assert "override" not in {
            one.kind(key) for key in one.sources if key.startswith("planning")
        }


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (500, b"", "the server answered with 500 Internal Server Error"),
        (404, b"{}", "the server answered with 404 Not Found"),
        (302, b"", "the server answered with 302 Found"),
        (200, b" " * (1024 * 1024 + 1), "the answer is larger than 1048576 bytes"),
    ],
)
def test_override_that_fails_stops_nothing(status, body, reason):
    """A server that answers with an error or too much is passed over with a warning; redirects are not followed."""
    with server(body, status) as asked:
        loaded = from_server(asked.url, PLANNING_STRATEGY="simple")
    assert len(asked.requests) == 1
    without = load(
        environ={"PLANNING_STRATEGY": "simple"}, arguments={"override.url": asked.url}, override=own
    )
    assert loaded.settings == without.settings
    assert list(map(str, loaded.warnings)) == [
        f"override {asked.url}: {reason}; the person's settings are ignored"
    ]


def test_server_that_is_silent_or_gone():
    """One that does not answer in time, and one that is not there, are passed over as well."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        (warning,) = load(arguments={"override.url": address, "override.timeout": 0.05}).warnings
    assert warning.message.startswith("the server did not answer within 50 ms")
    (warning,) = from_server(address).warnings
    assert warning.message.startswith("the server cannot be asked: ")


def test_function_that_fails():
    """A function that raises is passed over with a warning, without the secrets that its error tells."""

    def failing() -> None:
        raise LookupError("no row for token=hunter2hunter2")

    (warning,) = load(override=failing).warnings
    assert str(warning) == (
        "override: it failed with LookupError: no row for token=[redacted]; the person's settings are ignored"
    )


# Variables that are misspelt


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("REPLANNING_LLM_MODLE", "REPLANNING_LLM_MODEL"),
        ("REPLANNING_PROVIDERS", "REPLANNING_PROVIDER"),
        ("REPLANING_ENABLED", "REPLANNING_ENABLED"),
        ("PLANNING_STRATEGIE", "PLANNING_STRATEGY"),
        ("MAX_TOTAL_REPLAN", "MAX_TOTAL_REPLANS"),
        ("replanning_enabled", "REPLANNING_ENABLED"),
        ("PLANNING_REFLECTION_DEPTH", "REPLANNING_PLANNING__REFLECTION__DEPTH"),
        ("REPLANNING_TIMEOUT_TASK", "REPLANNING_TIMEOUT__TASK"),
        ("REPLANNING_TIMEOUTS__TASK", "REPLANNING_TIMEOUT__TASK"),
        ("REPLANNING_TIMEOUT__task", "REPLANNING_TIMEOUT__TASK"),
    ],
)
def test_misspelt_variable(name, meant):
    """A variable that looks misspelt is told with the one that was probably meant, and never with what it holds."""
    loaded = load(environ={name: "hunter2"})
    told = f"environment {name}: nothing is read from it; did you mean {meant!r}?"
    assert [str(warning) for warning in loaded.warnings] == [told]
    assert loaded.settings == Settings()


OF_OTHERS = """
REPLANNING_OF_SOMEBODY_ELSE REPLANNING_HOME REPLANNING_VERSION REPLANNING_SETTINGS REPLANNING_DATABASE_URL
PLANNING_POKER_ROOM SCANNING_ENABLED MAX_CONNECTIONS PATH HOME
"""


def test_variables_of_others():
    """What other parts read, and what has nothing to do with settings, is left alone; so is a variable without a value."""
    assert load(environ=dict.fromkeys([*OTHERS, *OF_OTHERS.split()], "1")).warnings == ()
    assert load(environ={"REPLANNING_LLM_MODLE": " "}).warnings == ()


def test_every_variable_is_known():
    """Every variable that the code reads is known in the one place that tells misspelt ones."""
    found = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(
            r'"((?:REPLANNING|PLANNING)_[A-Z_]+)"', path.read_text(encoding="utf-8")
        )
        if not name.endswith("_")
    }
    assert found == {name for name, _ in VARIABLES if "PLANNING_" in name} | set(OTHERS)
    assert {key for _, key in VARIABLES} <= {
        key for key, is_section in keys().items() if not is_section
    }


def test_one_provider_is_a_list_of_one():
    """One name stands for a list of one."""
    assert Settings.model_validate({"provider": "repair"}).provider == ("repair",)


def test_a_section_of_thresholds_is_a_mapping():
    """What is no mapping is refused where thresholds are expected."""
    with pytest.raises(ReplanningError):
        PlanningReplanSettings.model_validate({"llm_decision": "often"})
