"""Settings: where they come from, which goes before which, and how wrong ones are told."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning import Settings
from replanning.config import LoadedSettings, load_settings
from replanning.errors import SettingsError


def settings_file(folder: Path, text: str, name: str = "settings.yaml") -> Path:
    """A settings file."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def load(folder: Path, text: str, **environ: str) -> LoadedSettings:
    """The settings of a file with this section, in this environment."""
    indented = "".join(f"  {line}\n" for line in text.splitlines())
    return load_settings(settings_file(folder, f"replanning:\n{indented}"), environ)


def problems(folder: Path, text: str, **environ: str) -> list[str]:
    """What is wrong with a section, without the name of the folder."""
    with pytest.raises(SettingsError) as caught:
        load(folder, text, **environ)
    return [str(problem).replace(f"{folder}/", "") for problem in caught.value.problems]


def test_nothing_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without file, environment and arguments the defaults hold, and nothing has a source."""
    monkeypatch.chdir(tmp_path)

    assert load_settings(environ={}) == LoadedSettings(Settings(), {})


ROWS = """\
replanning:
  enabled: true
  provider: auto
  triggers: [task-failed, timeout, context-changed, human-request, goal-unreachable, resource-changed]
  alternatives: {max_count: 3, min_confidence: 0.5, human_approval_threshold: 0.7, require_approval: false}
  retry: {max_attempts: 3, delay: 1, exponential_backoff: true}
  timeout: {task: 60, replan: 30}
  llm: {model: auto, temperature: 0.3, max_tokens: 2000}
  judge: {max_iterations: 3, timeout_seconds: 300}
  escalation: {on_no_alternative: null}
  judge_on: errors_and_interval
  failure_threshold: 1
  better_path: {min_gain: 0.15, every: 3, time_cap: 5}
  approval: {timeout: 300, on_timeout: null, always_for: [goal-unreachable]}
  limits: {replans_per_lineage: 3, replans_per_run: null}
  budget: {calls: null, tokens: null, money: null, wall_clock: null}
  cooldown: 30
  on_store_failure: pause
planning:
  enabled: true
  strategy: chain_of_thought
  max_subtasks: 100
  decomposition_level: moderate
  reflection: {enabled: true, trigger_on_error: true, trigger_interval: 3, depth: moderate}
  revision: {max_revisions: 3}
  history: {storage_type: jsonl, directory: planning_history, retention_days: 90}
  replanning:
    enabled: true
    llm_decision:
      min_confidence_threshold: 0.5
      require_user_confirmation_on_low_confidence: true
      user_confirmation_threshold: 0.3
      immediate_execution_threshold: 0.8
    goal_understanding:
      {max_clarification_requests: 2, auto_assume_on_no_response: true, auto_assume_timeout_minutes: 30}
    task_decomposition: {max_redecomposition_attempts: 3}
    action_sequence: {max_regeneration_attempts: 3}
    execution: {max_action_retries: 3, max_partial_replans: 2}
    reflection: {max_plan_revisions: 2}
    global: {max_total_replans: 10, infinite_loop_detection: true, same_trigger_max_count: 2}
"""


def test_every_setting_with_its_default(tmp_path: Path) -> None:
    """The file knows every setting under the name and with the default that the specification gives it."""
    loaded = load_settings(settings_file(tmp_path, ROWS), {})

    assert loaded.settings == Settings()
    assert len(loaded.sources) == 62


def test_file_is_found_where_the_program_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`replanning.yaml` and `.replanning.yaml` are found by themselves; both at once are an error."""
    monkeypatch.chdir(tmp_path)
    settings_file(tmp_path, "replanning: {cooldown: 5}", ".replanning.yaml")
    hidden = load_settings(environ={})
    settings_file(tmp_path, "replanning: {cooldown: 6}", "replanning.yaml")

    assert (hidden.settings.cooldown, hidden.sources) == (5, {"cooldown": ".replanning.yaml:1:14"})
    with pytest.raises(SettingsError, match="keep one of them"):
        load_settings(environ={})


def test_order_of_sources(tmp_path: Path) -> None:
    """An argument goes before the environment, that before the file, and that before the default."""
    file = settings_file(tmp_path, "replanning: {cooldown: 1, alternatives: {min_confidence: 0.1, max_count: 1}}")
    environ = {"REPLANNING_MIN_CONFIDENCE": "0.2", "REPLANNING_APPROVAL_THRESHOLD": "0.4"}

    loaded = load_settings(file, environ, arguments={"alternatives.human_approval_threshold": 0.6})
    alternatives = loaded.settings.alternatives

    assert (loaded.settings.cooldown, alternatives.max_count) == (1, 1)
    assert (alternatives.min_confidence, alternatives.human_approval_threshold) == (0.2, 0.6)
    assert alternatives.min_llm_confidence == Settings().alternatives.min_llm_confidence
    assert loaded.sources == {
        "cooldown": f"{file}:1:14",
        "alternatives.max_count": f"{file}:1:63",
        "alternatives.min_confidence": "environment REPLANNING_MIN_CONFIDENCE",
        "alternatives.human_approval_threshold": "argument",
    }


@pytest.mark.parametrize(
    ("variable", "text", "key", "value"),
    [
        ("REPLANNING_ENABLED", "off", "enabled", False),
        ("MUSUBI_REPLAN_ENABLED", "0", "enabled", False),
        ("REPLANNING_ENABLED", "Yes", "enabled", True),
        ("REPLANNING_MIN_CONFIDENCE", "0.25", "alternatives.min_confidence", 0.25),
        ("REPLANNING_MIN_CONFIDENCE", "0", "alternatives.min_confidence", 0),
        ("REPLANNING_APPROVAL_THRESHOLD", "0.9", "alternatives.human_approval_threshold", 0.9),
        ("MUSUBI_REPLAN_MIN_CONFIDENCE", "0.9", "alternatives.human_approval_threshold", 0.9),
        ("REPLANNING_PROVIDER", "repair", "provider", ("repair",)),
        ("MUSUBI_LLM_PROVIDER", "openai, repair", "provider", ("openai", "repair")),
    ],
)
def test_environment(tmp_path: Path, variable: str, text: str, key: str, value: object) -> None:
    """Each variable, and each of its aliases, sets its own setting and no other."""
    loaded = load(tmp_path, "enabled: true\ncooldown: 30", **{variable: text})
    *sections, name = key.split(".")
    found = getattr(getattr(loaded.settings, sections[0]) if sections else loaded.settings, name)

    assert found == value
    assert loaded.sources[key] == f"environment {variable}"


def test_alias_gives_way(tmp_path: Path) -> None:
    """Where a variable and its alias are both set, the variable counts; an empty one says nothing."""
    both = load(tmp_path, "", REPLANNING_ENABLED="true", MUSUBI_REPLAN_ENABLED="false")
    empty = load(tmp_path, "", REPLANNING_ENABLED="", MUSUBI_REPLAN_ENABLED="false")

    assert (both.settings.enabled, empty.settings.enabled) == (True, False)


def test_lists_replace(tmp_path: Path) -> None:
    """A list in the file replaces the default and is not merged with it (defect 4)."""
    loaded = load(tmp_path, "triggers: [timeout]\napproval: {always_for: []}\nprovider: [one, two]")

    assert loaded.settings.triggers == ("timeout",)
    assert loaded.settings.approval.always_for == ()
    assert loaded.settings.provider == ("one", "two")


def test_zero_is_zero(tmp_path: Path) -> None:
    """A weight, threshold or limit of 0 is 0 and not the default (defects 9 and 10)."""
    loaded = load(
        tmp_path,
        """\
weights: {past_success: 0, self_assessment: 0.7}
alternatives: {min_confidence: 0}
limits: {replans_per_run: 0}
cooldown: 0
""",
    )

    assert (loaded.settings.weights.past_success, loaded.settings.alternatives.min_confidence) == (0, 0)
    assert (loaded.settings.limits.replans_per_run, loaded.settings.cooldown) == (0, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("enabled: maybe", "settings.yaml:2:3 enabled: expected true or false, got 'maybe'"),
        ("cooldown: -1", "settings.yaml:2:3 cooldown: expected a number of at least 0, got -1"),
        ("cooldown: true", "settings.yaml:2:3 cooldown: expected a number of at least 0, got True"),
        ("cooldown: '5'", "settings.yaml:2:3 cooldown: expected a number of at least 0, got '5'"),
        ("timeout: {task: 0}", "settings.yaml:2:13 timeout.task: expected a number above 0, got 0"),
        (
            "alternatives:\n  min_confidence: 1.5",
            "settings.yaml:3:5 alternatives.min_confidence: expected a number from 0 to 1, got 1.5",
        ),
        (
            "alternatives: {max_count: 2.5}",
            "settings.yaml:2:18 alternatives.max_count: expected a whole number from 1 to 20, got 2.5",
        ),
        (
            "retry: {exponential_backoff: 2}",
            "settings.yaml:2:11 retry.exponential_backoff: expected true or false, got 2",
        ),
        (
            "approval: {on_timeout: panic}",
            "settings.yaml:2:14 approval.on_timeout: expected one of abort, skip, continue, pause or null, got 'panic'",
        ),
        (
            "limits: {replans_per_run: -1}",
            "settings.yaml:2:12 limits.replans_per_run: expected a whole number of at least 0 or null, got -1",
        ),
        ("provider: []", "settings.yaml:2:3 provider: expected a list of text, at least one, got ()"),
        ("limits: 3", "settings.yaml:2:3 limits: expected a section with replans_per_lineage, replans_per_run; got 3"),
        ("colour: red", "settings.yaml:2:3 colour: there is no such setting; known are enabled, provider, triggers,"),
        ("cool_down: 3", "settings.yaml:2:3 cool_down: there is no such setting; did you mean 'cooldown'?"),
        (
            "retry: {exponential: true}",
            "settings.yaml:2:11 retry.exponential: there is no such setting; did you mean 'retry.exponential_backoff'?",
        ),
        ("weights: {simplicity: 0.5}", "settings.yaml:2:13 weights: the weights sum to 1.4; they must sum to 1"),
    ],
)
def test_wrong_value(tmp_path: Path, text: str, message: str) -> None:
    """A wrong value is told with its place, its key, what is allowed and what was given."""
    (found,) = problems(tmp_path, text)

    assert found.startswith(message)


def test_unknown_trigger(tmp_path: Path) -> None:
    """A trigger that does not exist is named, with those that do."""
    (found,) = problems(tmp_path, "triggers: [timeout, earthquake]")

    assert "'earthquake'" in found
    assert "task-failed, timeout, context-changed, better-path-found" in found


def test_wrong_variable(tmp_path: Path) -> None:
    """A wrong value in the environment is told with the name of its variable and what is allowed."""
    found = problems(tmp_path, "", REPLANNING_MIN_CONFIDENCE="high", MUSUBI_REPLAN_ENABLED="perhaps")

    assert found == [
        "environment MUSUBI_REPLAN_ENABLED enabled: expected true or false, got 'perhaps'",
        "environment REPLANNING_MIN_CONFIDENCE alternatives.min_confidence: expected a number from 0 to 1, got 'high'",
    ]


def test_all_problems_at_once(tmp_path: Path) -> None:
    """Every problem of every source is told in one error."""
    file = settings_file(tmp_path, "replanning: {cooldown: -1, nothing: 1, api_key: x}\nother: {}")

    with pytest.raises(SettingsError) as caught:
        load_settings(file, {"REPLANNING_APPROVAL_THRESHOLD": "2"}, arguments={"failure_threshold": 0})

    told = str(caught.value)
    for place in (
        "settings.yaml:1:14 cooldown",
        "nothing:",
        "api_key:",
        "settings.yaml other:",
        "argument failure_threshold",
    ):
        assert place in told
    assert "environment REPLANNING_APPROVAL_THRESHOLD alternatives.human_approval_threshold" in told
    assert len(caught.value.problems) == 6
    assert str(caught.value).startswith("the settings are not valid (6 problems)")


@pytest.mark.parametrize(
    "text", ["api_key: {}", "openai:\n  api_key: {}", "anthropic_api_key: {}", "llm: {{token: {}}}"]
)
def test_keys_stay_out_of_files(tmp_path: Path, text: str) -> None:
    """A key of an API service in the file is an error that names it and does not repeat it."""
    (found,) = problems(tmp_path, text.format("hunter2hunter2"))

    assert "environment alone" in found
    assert "hunter2" not in found


def test_secrets_are_not_repeated(tmp_path: Path) -> None:
    """What looks like a secret is not repeated in the message about it, wherever it stands."""
    (found,) = problems(tmp_path, "cooldown: sk-abcdefghijklmnopqrstuvwx")

    assert "[redacted]" in found
    assert "abcdefgh" not in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", None),
        ("replanning:\n", None),
        ("replanning: {limits: }\n", None),
        ("- 1\n", "expected a mapping with the section 'replanning'"),
        ("replanning: [1]\n", "there is no such setting"),
        ("replanning: {a: &x [1], b: *x, a: 2}\n", "a"),
        ("replanning: {cooldown: [", "settings.yaml"),
        ("\x00", "settings.yaml"),
    ],
)
def test_hostile_files(tmp_path: Path, text: str, message: str | None) -> None:
    """Files that are empty, malformed or something else are taken as empty, or refused with a sentence."""
    file = settings_file(tmp_path, text)

    if message is None:
        assert load_settings(file, {}).settings == Settings()
    else:
        with pytest.raises(SettingsError) as caught:
            load_settings(file, {})
        assert message in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A file that was named and is missing, too large or no text is refused."""
    (tmp_path / "large.yaml").write_bytes(b"#" * (1024 * 1024 + 1))
    (tmp_path / "latin.yaml").write_bytes(b"replanning: {provider: \xfc}")

    for name, message in {
        "none.yaml": "No such file",
        "large.yaml": "larger than",
        "latin.yaml": "byte 24 of the file is not UTF-8",
        "": "cannot be read",
    }.items():
        with pytest.raises(SettingsError, match=message):
            load_settings(tmp_path / name, {})


KEYS = st.sampled_from(
    ["cooldown", "enabled", "retry.delay", "limits", "approval.on_timeout", "weights.simplicity", "a.b"]
)
VALUES = st.sampled_from([None, True, 0, -1, 0.5, 10**400, "", "skip", "1", [], ["x"], {}, {"delay": 1}])


@given(st.dictionaries(KEYS | st.text(max_size=5), VALUES, max_size=5))
def test_any_arguments(overrides: dict[str, object]) -> None:
    """Whatever arguments say: each of them counts and is named as a source, or the error lists what is wrong."""
    try:
        sources = load_settings(environ={}, arguments=overrides).sources  # type: ignore[arg-type]
    except SettingsError as error:
        sources = {}
        refused = error.problems
    else:
        refused = ()

    assert refused or set(sources) == {key for key, value in overrides.items() if (key, value) != ("limits", None)}


def test_prices(tmp_path: Path) -> None:
    """Prices go by the names of models, which may hold dots, and stay whole from file to arguments."""
    loaded = load(tmp_path, "llm:\n  prices:\n    gpt-4.1: {input: 2, output: 8}\n    'own-*': {input: 0, output: 0}")

    assert {name: (price.input, price.output) for name, price in loaded.settings.llm.prices.items()} == {
        "gpt-4.1": (2, 8),
        "own-*": (0, 0),
    }
    assert dict(loaded.sources) == {"llm.prices": f"{tmp_path}/settings.yaml:3:5"}
    given = load_settings(environ={}, arguments={"llm.prices": {"o3": {"input": 1, "output": 2}}})
    assert given.settings.llm.prices["o3"].output == 2
    assert load(tmp_path, "llm:\n  prices:").settings.llm.prices == {}


def test_wrong_prices(tmp_path: Path) -> None:
    """A wrong price is told with the model that it is of."""
    section = """\
llm:
  prices:
    gpt-4.1: {input: -2, output: 8}
    gpt-4.2: {input: 2}
    gpt-4.3: {input: 2, output: 8, cached: 1}
    gpt-4.4: 7"""

    assert problems(tmp_path, section) == [
        "settings.yaml:3:5 llm.prices gpt-4.1 input: expected a number of at least 0, got -2",
        "settings.yaml:3:5 llm.prices gpt-4.2 output: it is missing",
        "settings.yaml:3:5 llm.prices gpt-4.3 cached: there is no such setting",
        "settings.yaml:3:5 llm.prices gpt-4.4: expected a section with input, output, got 7",
    ]
    assert problems(tmp_path, "llm: {prices: [1]}") == [
        "settings.yaml:2:9 llm.prices: expected a mapping by name, got [1]"
    ]


def test_language_models_from_the_environment(tmp_path: Path) -> None:
    """Variables say which model is asked, where, how, and who stands in for it."""
    environ = {
        "REPLANNING_LLM_MODEL": "gpt-4.1",
        "REPLANNING_LLM_TEMPERATURE": "0.7",
        "REPLANNING_LLM_MAX_TOKENS": "500",
        "REPLANNING_LLM_BASE_URL": "http://localhost:8000/v1",
        "REPLANNING_LLM_FALLBACK": "anthropic, ollama",
        "REPLANNING_LLM_OLLAMA": "yes",
    }
    llm = load(tmp_path, "llm: {model: other}", **environ).settings.llm

    assert (llm.model, llm.temperature, llm.max_tokens, llm.base_url) == (
        "gpt-4.1",
        0.7,
        500,
        "http://localhost:8000/v1",
    )
    assert (llm.fallback, llm.ollama) == (("anthropic", "ollama"), True)
    assert problems(tmp_path, "enabled: true", REPLANNING_LLM_MAX_TOKENS="many") == [
        "environment REPLANNING_LLM_MAX_TOKENS llm.max_tokens: expected a whole number of at least 1, got 'many'"
    ]


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://me:hunter22@host/v1", "'https://me:[redacted]@host/v1'"),
        ("https://sk-abcdefghijklmnopqrstuv@host/v1", "'https://[redacted]@host/v1'"),
        ("https://host/v1?api_key=abcdef123456", "'https://host/v1?api_key=[redacted]'"),
    ],
)
def test_address_without_secrets(tmp_path: Path, address: str, shown: str) -> None:
    """An address that holds more than an address is refused, and its secret is not shown."""
    expected = (
        "settings.yaml:2:9 llm.base_url: it holds more than an address: names, passwords and keys do not belong here;"
        f" keys are taken from the environment alone; got {shown}"
    )
    assert problems(tmp_path, f"llm: {{base_url: '{address}'}}") == [expected]
    with pytest.raises(ValueError, match="more than an address") as caught:
        Settings.model_validate({"llm": {"base_url": address}})
    assert address not in str(caught.value)


@pytest.mark.parametrize("address", ["localhost:8000", "ftp://host/v1", "http://", "http://[::1", "http://host:99999"])
def test_no_address(tmp_path: Path, address: str) -> None:
    """What is no address of a web server is refused with an example of one."""
    (problem,) = problems(tmp_path, f"llm: {{base_url: '{address}'}}")
    assert "expected an address that begins with http:// or https://" in problem


def test_addresses(tmp_path: Path) -> None:
    """Addresses of web servers are taken as they are, and none is one, too."""
    for address in ("http://localhost:11434", "https://host.example/v1/", "http://[::1]:8000/v1"):
        assert load(tmp_path, f"llm: {{base_url: '{address}'}}").settings.llm.base_url == address
    assert load(tmp_path, "llm: {base_url: null}").settings.llm.base_url is None


def test_key_among_settings_of_models(tmp_path: Path) -> None:
    """A key is refused wherever in the section of language models it stands."""
    (problem,) = problems(tmp_path, "llm: {api_key: sk-abcdefghijklmnopqrstuv}")
    assert "keys of API services are taken from the environment alone" in problem
    assert "sk-abc" not in problem
