"""Settings of a person from functions and servers, variables by name, ranges, and which source goes before which."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning import Settings
from replanning.config import OTHERS, VARIABLES, LoadedSettings, keys, load_settings, values
from replanning.errors import SettingsError
from replanning.settings import PriceSettings

PACKAGE = Path(__file__).parents[2] / "replanning"
FORM = 'expected {"status": "success", "data": {"planning": {…}}}'


@contextmanager
def server(body: bytes, status: int = 200) -> Iterator[tuple[str, list[str]]]:
    """A real server that answers every request alike; its address, and what was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}/users/eve", asked
        finally:
            http.shutdown()
            thread.join()


def own(**planning: Any) -> dict[str, Any]:
    """What a function or server answers for a person with these settings."""
    return {"status": "success", "data": {"planning": planning}}


def from_server(address: str, **more: str) -> LoadedSettings:
    """The settings with those of a server."""
    return load_settings(environ={"REPLANNING_OVERRIDE_URL": address, **more})


def problems(**given: Any) -> list[str]:
    """Everything that is wrong with settings."""
    with pytest.raises(SettingsError) as caught:
        load_settings(**given)
    return [str(problem) for problem in caught.value.problems]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the program runs: a folder without settings."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Which goes before which

ORDER = ("file", "override", "environment", "argument")


@given(st.dictionaries(st.sampled_from(ORDER), st.integers(1, 10_000)), st.booleans())
def test_order_of_all_sources(tmp_path_factory: pytest.TempPathFactory, said: dict[str, int], other: bool) -> None:
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


def test_lists_of_a_higher_source_replace(folder: Path) -> None:
    """A list of a higher source stands in place of a lower one's; no item of that is left."""
    (folder / "replanning.yaml").write_text("replanning: {provider: [one, two], llm: {fallback: [three, four]}}")
    loaded = load_settings(environ={"REPLANNING_PROVIDER": "five"}, arguments={"llm.fallback": []})
    assert (loaded.settings.provider, loaded.settings.llm.fallback) == (("five",), ())


# Names and ranges


@pytest.mark.parametrize(
    ("name", "text", "key", "value"),
    [
        ("REPLANNING_ENABLED", "false", "enabled", False),
        ("REPLANNING_MIN_CONFIDENCE", "0.6", "alternatives.min_confidence", 0.6),
        ("MAX_TOTAL_REPLANS", "4", "planning.replanning.global.max_total_replans", 4),
        ("PLANNING_ENABLED", "false", "planning.enabled", False),
        ("PLANNING_STRATEGY", "hierarchical", "planning.strategy", "hierarchical"),
        ("PLANNING_MAX_SUBTASKS", "7", "planning.max_subtasks", 7),
        ("REFLECTION_ENABLED", "false", "planning.reflection.enabled", False),
        ("REFLECTION_INTERVAL", "0", "planning.reflection.trigger_interval", 0),
        ("MAX_PLAN_REVISIONS", "1", "planning.revision.max_revisions", 1),
        ("REPLANNING_PROVIDER", "repair", "provider", ["repair"]),
        ("REPLANNING_APPROVAL_THRESHOLD", "0.9", "alternatives.human_approval_threshold", 0.9),
        ("MUSUBI_REPLAN_ENABLED", "false", "enabled", False),
        ("MUSUBI_LLM_PROVIDER", "openai", "provider", ["openai"]),
        ("MUSUBI_REPLAN_MIN_CONFIDENCE", "0.9", "alternatives.human_approval_threshold", 0.9),
    ],
)
def test_variables(name: str, text: str, key: str, value: Any) -> None:
    """Every variable of the specification sets its setting, and is named as its source."""
    loaded = load_settings(environ={name: text})
    same = load_settings(environ={}, arguments={key: value})
    assert (loaded.settings, loaded.sources) == (same.settings, {key: f"environment {name}"})


# What a setting of this kind may be, beside its default: as text of a variable, and as it is then.
OTHERWISE = (("0.7", 0.7), ("7", 7), ("off", False), ("on", True), ("timeout, task-failed", ["timeout", "task-failed"]))
OF_ITS_OWN = {
    "provider": ("a, b", ["a", "b"]),
    "override.url": ("http://localhost:1/settings", "http://localhost:1/settings"),
    "llm.base_url": ("http://localhost:1/v1", "http://localhost:1/v1"),
    "llm.prices": ('{"o3.X": {"input": 1, "output": 2.5}}', {"o3.X": {"input": 1, "output": 2.5}}),
    "budget.money": ("null", None),
    "redaction.patterns": (r"card-\d{2,4}", [r"card-\d{2,4}"]),
    "judge.timeout_seconds": ("100", 100),
}


@pytest.mark.parametrize("key", [key for key, is_section in keys().items() if not is_section])
def test_every_setting_has_a_variable(key: str) -> None:
    """A variable with the long name of a setting says what an argument of that key would, and is named as its source."""
    name = f"REPLANNING_{key.replace('.', '__').upper()}"
    default = values(Settings())[key]
    options = [OF_ITS_OWN[key]] if key in OF_ITS_OWN else [_as_text(default), *OTHERWISE]
    found = 0
    for text, value in options:
        try:
            same = load_settings(environ={}, arguments={key: value}, override=_nobody)
        except SettingsError:
            continue
        loaded = load_settings(environ={name: text}, override=_nobody)
        assert (loaded.settings, loaded.sources) == (same.settings, {key: f"environment {name}"})
        found += 1
    assert found


def _as_text(value: Any) -> tuple[str, Any]:
    return (value if isinstance(value, str) else json.dumps(value)), value


def _nobody() -> object:
    """Settings of a person who has set nothing."""
    return {"status": "success", "data": {"planning": {}}}


def test_sections_from_variables() -> None:
    """A section may be one variable with JSON; what is wrong in it is told with the name of that variable."""
    name = "REPLANNING_ALTERNATIVES"
    loaded = load_settings(environ={name: '{"max_count": 4}', f"{name}__MIN_CONFIDENCE": "0.4"})
    assert (loaded.settings.alternatives.max_count, loaded.settings.alternatives.min_confidence) == (4, 0.4)
    assert loaded.sources == {
        "alternatives.max_count": f"environment {name}",
        "alternatives.min_confidence": f"environment {name}__MIN_CONFIDENCE",
    }
    deep, whole = "[" * 100_000, '{"a":' * 300 + "1" + "}" * 300
    for text, told in (
        (whole, f"environment {name} alternatives: expected a section with max_count, "),
        (
            '{"max_count": "many"}',
            f"environment {name} alternatives.max_count: expected a whole number from 1 to 20, got 'many'",
        ),
        ('{"nix": 1}', f"environment {name} alternatives.nix: there is no such setting; "),
        ("{", f"environment {name} alternatives: expected a section with max_count, "),
        (deep, f"environment {name} alternatives: expected a section with max_count, "),
    ):
        (problem,) = problems(environ={name: text})
        assert problem.startswith(told)
    told = "environment REPLANNING_LLM__API_KEY llm.api_key: keys of API services are taken from the environment alone"
    (problem,) = problems(environ={"REPLANNING_LLM__API_KEY": "sk-1234567890"})
    assert problem.startswith(told)
    assert "sk-1234567890" not in problem


def test_patterns_from_a_variable() -> None:
    """A pattern is not cut at its commas, with which it would find other things; several stand as JSON."""
    for text, patterns in ((r"card-\d{2,4}", (r"card-\d{2,4}",)), ('["a{1,2}", "b"]', ("a{1,2}", "b"))):
        loaded = load_settings(environ={"REPLANNING_REDACTION__PATTERNS": text})
        assert loaded.settings.redaction.patterns == patterns


def test_prices_from_variables_of_their_own() -> None:
    """The price of a model may be a variable, or two; what is wrong is told with the name of the one that says it."""
    name = "REPLANNING_LLM__PRICES__O3"
    for environ in ({name: '{"input": 2, "output": 8}'}, {f"{name}__INPUT": "2", f"{name}__OUTPUT": "8"}):
        loaded = load_settings(environ=environ)
        assert loaded.settings.llm.prices == {"o3": PriceSettings(input=2, output=8)}
        assert loaded.sources == {"llm.prices": f"environment {next(iter(environ))}"}
    assert problems(environ={name: "much"}) == [
        f"environment {name} llm.prices o3: expected a section with input, output, got 'much'"
    ]


@pytest.mark.parametrize("name", ["REPLANNING_LLM", "REPLANNING_LLM__TEMPERATURE", "REPLANNING_TRIGGERS"])
@pytest.mark.parametrize("form", ["{}", '["{}"]', '[{{"password": "{}"}}]'])
def test_no_secret_in_what_is_wrong(name: str, form: str) -> None:
    """A key that was put where it does not belong is not told, nor a part of it, however long it is."""
    told = "; ".join(problems(environ={name: form.format(f"sk-{'a' * 20}{'b' * 200}")}))
    assert name in told
    assert "bbb" not in told


@pytest.mark.parametrize("name", ["REPLANNING_LLM_MODEL", "REPLANNING_PROVIDER", "REPLANNING_TIMEOUT__TASK"])
def test_variable_that_is_no_text(name: str) -> None:
    """Bytes that are no text are told with the name of the variable that holds them."""
    (problem,) = problems(environ={name: os.fsdecode(b"caf\xe9")})
    assert problem.startswith(f"environment {name} ")
    assert problem.endswith("it holds what is no text in UTF-8")


@given(
    st.dictionaries(
        st.sampled_from(["ALTERNATIVES", "LLM", "PLANNING__REPLANNING", "LLM__PRICES__", "PROVIDER", "X", ""]).flatmap(
            lambda lead: st.text("AX_.[ éẞ", max_size=4).map(lambda end: f"REPLANNING_{lead}{end}")
        )
        | st.sampled_from([f"REPLANNING_{key.replace('.', '__').upper()}" for key in keys() if "override" not in key]),
        st.sampled_from(
            ["", "{", "\udcff", '{"a.b": {"c": 1}}', '{"max_count": NaN}', "[]", "null", "1e999", "a,,b", "\x00"]
        ),
        max_size=4,
    )
)
def test_any_variables(environ: dict[str, str]) -> None:
    """Whatever variables there are, settings come of them or one error that names each of those that are wrong."""
    try:
        load_settings(environ=environ)
    except SettingsError as error:
        told = [str(problem) for problem in error.problems]
    else:
        told = []
    assert all(line.startswith("environment REPLANNING_") for line in told)


def test_values_that_are_nested_deep() -> None:
    """A value that is nested deeper than any setting is told with its key and where it comes from."""
    deep: object = 1
    for _ in range(400):
        deep = [deep]
    for key in ("llm", "llm.model", "llm.prices"):
        assert problems(environ={}, arguments={key: deep}) == [f"argument {key}: nested more than 20 deep"]
    (problem,) = problems(environ={}, override=lambda: own(strategy=deep))
    assert problem == "override planning.strategy: nested more than 20 deep"


def test_variable_of_many_sections() -> None:
    """A name that goes deeper than any setting is nobody's, and does no harm."""
    loaded = load_settings(environ={f"REPLANNING_TIMEOUT{'__X' * 5_000}": "1"})
    assert (loaded.settings, loaded.warnings) == (Settings(), ())


def test_short_names_go_before_long_ones() -> None:
    """Where a setting has a short name and both are set, the short one counts."""
    environ = {"MAX_TOTAL_REPLANS": "4", "REPLANNING_PLANNING__REPLANNING__GLOBAL__MAX_TOTAL_REPLANS": "5"}
    loaded = load_settings(environ=environ)
    assert loaded.settings.planning.replanning.overall.max_total_replans == 4
    assert loaded.sources == {"planning.replanning.global.max_total_replans": "environment MAX_TOTAL_REPLANS"}


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
        ("better_path.min_gain", (0, 1), (-0.1, 1.1), "a number from 0 to 1"),
        ("better_path.every", (1,), (0,), "a whole number of at least 1"),
        ("limits.replans_per_run", (0, None), (-1,), "a whole number of at least 0 or null"),
        ("escalation.on_no_alternative", ("wait", "assume", "abort", None), ("hope",), "one of wait, assume, abort"),
        ("judge_on", ("errors_and_interval", "every_action"), ("never",), "one of errors_and_interval, every_action"),
        ("on_store_failure", ("pause", "continue_unjournaled"), ("stop",), "one of pause, continue_unjournaled"),
        ("planning.max_subtasks", (1,), (0,), "a whole number of at least 1"),
        ("planning.strategy", ("chain_of_thought", "hierarchical", "simple"), ("none",), "one of chain_of_thought"),
        ("planning.decomposition_level", ("detailed", "moderate", "minimal"), ("fine",), "one of detailed, moderate"),
        ("planning.reflection.depth", ("deep", "moderate", "shallow"), ("none",), "one of deep, moderate, shallow"),
        ("planning.reflection.trigger_interval", (0,), (-1,), "a whole number of at least 0"),
        ("planning.history.storage_type", ("jsonl",), ("xml",), "jsonl"),
        ("planning.history.directory", ("here",), ("",), "text that is not empty"),
        ("planning.history.retention_days", (1,), (0,), "a whole number of at least 1"),
        ("planning.replanning.global.same_trigger_max_count", (1,), (0,), "a whole number of at least 1"),
        ("planning.replanning.llm_decision.min_confidence_threshold", (0.3, 0.8), (1.1,), "a number from 0 to 1"),
    ],
)
def test_ranges(key: str, inside: tuple[Any, ...], outside: tuple[Any, ...], allowed: str) -> None:
    """The edges of what is allowed are; beyond them a setting is refused by its key, its source and what is allowed."""
    for value in inside:
        assert load_settings(environ={}, arguments={key: value}).sources == {key: "argument"}
    for value in outside:
        (problem,) = problems(environ={}, arguments={key: value})
        assert problem.startswith(f"argument {key}: expected {allowed}")
        assert problem.endswith(f"got {value!r}")


def test_bands_in_order() -> None:
    """The bands of confidence stay in order, 0 <= user <= min <= immediate <= 1, whichever sources say them."""
    lead = "planning.replanning.llm_decision"
    (problem,) = problems(
        environ={},
        arguments={f"{lead}.user_confirmation_threshold": 0.6},
        override=lambda: own(replanning={"llm_decision": {"min_confidence_threshold": 0.55}}),
    )
    assert problem == (
        f"override, argument {lead}: expected user_confirmation_threshold <= min_confidence_threshold <="
        " immediate_execution_threshold, got 0.6, 0.55, 0.8"
    )


def test_problems_of_every_source_at_once(folder: Path) -> None:
    """All sources are looked at before anything is refused."""
    (folder / "replanning.yaml").write_text("replanning: {cooldown: -1}")
    told = problems(
        environ={"PLANNING_STRATEGY": "wild"},
        arguments={"failure_threshold": 0, "llm.model": object()},
        override=lambda: own(max_subtasks=0, stategy="simple"),
    )
    assert sorted(told) == [
        "argument failure_threshold: expected a whole number of at least 1, got 0",
        *(one for one in told if one.startswith("argument llm.model: got <object object at")),
        "environment PLANNING_STRATEGY planning.strategy: expected one of chain_of_thought, hierarchical, simple, got 'wild'",
        "override planning.max_subtasks: expected a whole number of at least 1, got 0",
        "override planning.stategy: there is no such setting; did you mean 'planning.strategy'?",
        "replanning.yaml:1:14 cooldown: expected a number of at least 0, got -1",
    ]
    assert len(told) == 6


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("planning.judge_on", "judge_on"),
        ("max_subtasks", "planning.max_subtasks"),
        ("judge.max_iteration", "judge.max_iterations"),
    ],
)
def test_setting_of_another_section(key: str, meant: str) -> None:
    """A setting that stands in the wrong section, or is misspelt, is told with the one that was meant."""
    assert problems(environ={}, arguments={key: 1}) == [
        f"argument {key}: there is no such setting; did you mean {meant!r}?"
    ]


# Settings of a person


def test_override_by_a_function() -> None:
    """A function says what a person has set; what else it says is passed over."""
    answer = own(strategy="simple", reflection={"trigger_interval": 0}) | {"message": "hello"}
    loaded = load_settings(environ={}, override=lambda: answer)
    assert (loaded.settings.planning.strategy, loaded.settings.planning.reflection.trigger_interval) == ("simple", 0)
    assert loaded.sources == {"planning.strategy": "override", "planning.reflection.trigger_interval": "override"}


def test_override_by_a_server() -> None:
    """A server is asked once, and what it says counts."""
    body = json.dumps(own(strategy="simple")).encode()
    with server(body) as (address, asked):
        loaded = from_server(address)
    assert asked == ["/users/eve"]
    assert loaded.settings.planning.strategy == "simple"
    assert loaded.sources["planning.strategy"] == f"override {address}"
    assert loaded.kind("planning.strategy") == "override"
    assert loaded.warnings == ()


def test_server_of_the_file(folder: Path) -> None:
    """The file may name the server as well; a variable goes before it, and a function before both."""
    with server(json.dumps(own(max_subtasks=5)).encode()) as (address, asked):
        (folder / "replanning.yaml").write_text(f"replanning: {{override: {{url: '{address}', timeout: 9}}}}")
        assert load_settings(environ={}).settings.planning.max_subtasks == 5
        assert load_settings(environ={}, override=own).settings.planning.max_subtasks == 100
        from_server(f"{address}/other")
    assert asked == ["/users/eve", "/users/eve/other"]


@pytest.mark.parametrize(
    ("answer", "got"),
    [
        ({"status": "error", "message": "no"}, "got status 'error'"),
        ({"status": "success"}, "got {'status': 'success'}"),
        ({"status": "success", "data": {}}, "got data with nothing in it"),
        ({"status": "success", "data": {"planing": {}}}, "got data with 'planing' in it"),
        ({"status": "success", "data": {"planning": [1]}}, "got data with 'planning' in it"),
        ({"status": "success", "data": None}, "got {"),
        ({"data": {"planning": {}}}, "got {'data'"),
        ([], "got []"),
        (None, "got None"),
        ({"status": "sk-abcdefghijklmnopqrstuvwx"}, "got status '[redacted]'"),
    ],
)
def test_override_of_another_form(answer: object, got: str) -> None:
    """An answer of another form is one error that says what was expected and what came, from a function or a server."""
    (told,) = problems(environ={}, override=lambda: answer)
    assert told.startswith(f"override: {FORM}, {got}")
    with server(json.dumps(answer).encode()) as (address, _):
        (told,) = problems(environ={"REPLANNING_OVERRIDE_URL": address})
    assert told.startswith(f"override {address}: {FORM}")


@pytest.mark.parametrize("answer", [object(), {"status": float("nan"), "data": {1, 2}}])
def test_override_that_is_no_json(answer: object) -> None:
    """What JSON cannot express is refused like any other wrong form."""
    (told,) = problems(environ={}, override=lambda: answer)
    assert told.startswith(f"override: {FORM}; got ")
    assert told.endswith("which JSON cannot express")


@pytest.mark.parametrize("body", [b"<html>", b"", b"{", b"\xff", b"[" * 10_000])
def test_server_that_sends_no_json(body: bytes) -> None:
    """An answer that is no JSON is an error that says what was expected."""
    with server(body) as (address, _):
        (told,) = problems(environ={"REPLANNING_OVERRIDE_URL": address})
    assert told.startswith(f"override {address}: {FORM}")


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (500, b"", "the server answered with 500 Internal Server Error"),
        (404, b"{}", "the server answered with 404 Not Found"),
        (302, b"", "the server answered with 302 Found"),
        (200, b" " * (1024 * 1024 + 1), "the answer is larger than 1048576 bytes"),
    ],
)
def test_override_that_fails_stops_nothing(status: int, body: bytes, reason: str) -> None:
    """A server that answers with an error or too much is passed over with a warning; redirects are not followed."""
    with server(body, status) as (address, asked):
        loaded = from_server(address, PLANNING_STRATEGY="simple")
    assert len(asked) == 1
    assert (
        loaded.settings
        == load_settings(
            environ={"PLANNING_STRATEGY": "simple"},
            arguments={"override.url": address},
            override=own,
        ).settings
    )
    assert list(map(str, loaded.warnings)) == [f"override {address}: {reason}; the settings of the person are left out"]


def test_server_that_is_silent_or_gone() -> None:
    """One that does not answer in time, and one that is not there, are passed over as well."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        (warning,) = load_settings(environ={}, arguments={"override.url": address, "override.timeout": 0.05}).warnings
    assert warning.message.startswith("the server did not answer within 0.05 s")
    (warning,) = from_server(address).warnings
    assert warning.message.startswith("the server cannot be asked: ")


def test_server_that_trickles() -> None:
    """One that sends its answer drop by drop is not waited for longer than the time that it has."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def trickle() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                try:
                    while True:
                        connection.sendall(b" ")
                except OSError:
                    pass

        thread = Thread(target=trickle)
        thread.start()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        (warning,) = load_settings(environ={}, arguments={"override.url": address, "override.timeout": 0.2}).warnings
        thread.join()
    assert "did not answer within 0.2 s" in warning.message or "is larger than" in warning.message


def test_function_that_fails() -> None:
    """A function that raises is passed over with a warning, without the secrets that its error tells."""

    def failing() -> None:
        raise LookupError("no row for token=hunter2hunter2")

    (warning,) = load_settings(environ={}, override=failing).warnings
    assert str(warning) == (
        "override: it failed with LookupError: no row for token=[redacted]; the settings of the person are left out"
    )


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://host.example/x", "expected an address that begins with https://; http:// only on this machine"),
        ("http://localhost.example/x", "expected an address that begins with https://"),
        ("ftp://localhost/x", "expected an address that begins with http:// or https://"),
        ("https://eve:hunter22@host/x", "it holds more than an address"),
        ("https://host/x?token=abcdefgh1234", "it holds more than an address"),
    ],
)
def test_address_of_an_override(address: str, message: str) -> None:
    """Settings are taken over https alone, or from this machine; an address with a secret in it is refused unseen."""
    (told,) = problems(environ={"REPLANNING_OVERRIDE_URL": address})
    assert told.startswith(f"environment REPLANNING_OVERRIDE_URL override.url: {message}")
    assert "hunter22" not in told
    assert "abcdefgh1234" not in told
    with pytest.raises(ValueError, match="override"):
        Settings.model_validate({"override": {"url": address}})


# Variables that are misspelt


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("REPLANNING_LLM_MODLE", "nothing is read from it; did you mean 'REPLANNING_LLM_MODEL'?"),
        ("REPLANNING_PROVIDERS", "nothing is read from it; did you mean 'REPLANNING_PROVIDER'?"),
        ("REPLANING_ENABLED", "nothing is read from it; did you mean 'REPLANNING_ENABLED'?"),
        ("PLANNING_STRATEGIE", "nothing is read from it; did you mean 'PLANNING_STRATEGY'?"),
        ("MAX_TOTAL_REPLAN", "nothing is read from it; did you mean 'MAX_TOTAL_REPLANS'?"),
        ("replanning_enabled", "nothing is read from it; did you mean 'REPLANNING_ENABLED'?"),
        (
            "PLANNING_REFLECTION_DEPTH",
            "nothing is read from it; did you mean 'REPLANNING_PLANNING__REFLECTION__DEPTH'?",
        ),
        (
            "REPLANNING_TIMEOUT_TASK",
            "nothing is read from it; did you mean 'REPLANNING_TIMEOUT__TASK'?",
        ),
        (
            "REPLANNING_TIMEOUTS__TASK",
            "nothing is read from it; did you mean 'REPLANNING_TIMEOUT__TASK'?",
        ),
        (
            "REPLANNING_TIMEOUT__task",
            "nothing is read from it; did you mean 'REPLANNING_TIMEOUT__TASK'?",
        ),
    ],
)
def test_misspelt_variable(name: str, told: str) -> None:
    """A variable that looks misspelt is told with the one that was probably meant, and never with what it holds."""
    loaded = load_settings(environ={name: "hunter2"})
    assert [str(warning) for warning in loaded.warnings] == [f"environment {name}: {told}"]
    assert loaded.settings == Settings()


@pytest.mark.parametrize(
    "name",
    [
        *OTHERS,
        "REPLANNING_OF_SOMEBODY_ELSE",
        "REPLANNING_HOME",
        "REPLANNING_VERSION",
        "REPLANNING_SETTINGS",
        "REPLANNING_DATABASE_URL",
        "PLANNING_POKER_ROOM",
        "SCANNING_ENABLED",
        "MAX_CONNECTIONS",
        "PATH",
        "HOME",
    ],
)
def test_variables_of_others(name: str) -> None:
    """What other parts read, and what has nothing to do with settings, is left alone; so is a variable without a value."""
    assert load_settings(environ={name: "1"}).warnings == ()
    assert load_settings(environ={"REPLANNING_LLM_MODLE": " "}).warnings == ()


def test_every_variable_is_known() -> None:
    """Every variable that the code reads is known in the one place that tells misspelt ones."""
    found = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in re.findall(r'"((?:REPLANNING|PLANNING)_[A-Z_]+)"', path.read_text(encoding="utf-8"))
        if not name.endswith("_")
    }
    assert found == {name for name, _ in VARIABLES if "PLANNING_" in name} | set(OTHERS)
    assert {key for _, key in VARIABLES} <= {key for key, is_section in keys().items() if not is_section}
