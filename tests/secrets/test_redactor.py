"""Secrets are taken out of text and values, and ordinary text stays as it is."""

import base64
import errno
import json
import os
import pydoc_data.topics
import random
import re
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, JsonValue

from replanning import Goal, Plan, PlanError, Task, secrets
from replanning.changes import ModifyTask, parse_changes
from replanning.errors import RecordNotSerializable
from replanning.journal import TriggerEvent
from replanning.plan.checks import secret_name_problems
from replanning.plan.types import JsonObject, TaskId
from replanning.secrets import MASK, Redactor, pattern_problem
from tests.support.cost import calls
from tests.support.secret_examples import JWT, PEM, TOKENS, WRAPPINGS, tells

REDACT = Redactor()
BEARER = "mF_9.B5f-4.1JqM"
BY_SHAPE = TOKENS

BY_NAME = [
    # prose and logs
    ("login failed, password: hunter2", "hunter2"),
    ("passwd = s3cr3t", "s3cr3t"),
    ("the passphrase is set: passphrase='correct horse battery'", "correct horse battery"),
    ("token: 9f86d081884c7d65", "9f86d081884c7d65"),
    ("Incorrect API key: ab12cd34ef56", "ab12cd34ef56"),
    ("client secret: 8Q~abcDEF123", "8Q~abcDEF123"),
    ("password=p@ss,w0rd! was refused", "p@ss,w0rd!"),
    # environment and options
    (
        "AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    ),
    ("OPENAI_API_KEY=abcdefabcdefabcdef", "abcdefabcdefabcdef"),
    ("DB_PASS=hunter2 MYSQL_PWD=hunter3", "hunter2"),
    ("DB_PASS=hunter2 MYSQL_PWD=hunter3", "hunter3"),
    ("SECRET_KEY=changeme python manage.py", "changeme"),
    ("mysql --user bob --password hunter2 -h db", "hunter2"),
    ("tool --api-key abc123def --verbose", "abc123def"),
    ("dbPassword=hunter2", "hunter2"),
    # JSON, YAML, Python, XML, connection strings
    ('{"password": "hunter2", "user": "bob"}', "hunter2"),
    ('{"api_key":"abcdefgh"}', "abcdefgh"),
    (r'{"body": "{\"clientSecret\": \"abc123def\"}"}', "abc123def"),
    ("{'token': 'deadbeefcafe'}", "deadbeefcafe"),
    ("private_key: 0123456789abcdef0123", "0123456789abcdef0123"),
    ("connect(user='bob', password='hunter2')", "hunter2"),
    ("<password>hunter2</password>", "hunter2"),
    ("Server=db;User=bob;Password=hunter2;Timeout=5", "hunter2"),
    ("Driver={ODBC};Uid=bob;Pwd=hunter2!;", "hunter2!"),
    (
        "AccountName=bob;AccountKey=lJzRc1YdHaAA2KCNJJ1tkYwF/+mKK6Ygw0NGe170Xu592euJv2wYUtBlV8z==;",
        "lJzRc1YdHaAA2KCN",
    ),
    # headers
    (f"Authorization: Bearer {BEARER}", BEARER),
    ("authorization: basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
    ('{"Authorization": "Token abcdefghijkl"}', "abcdefghijkl"),
    ("Authorization: a1b2c3d4e5f6", "a1b2c3d4e5f6"),
    (
        'Authorization: Digest username="bob", response="6629fae49393a05397450978507c4ef1"',
        "6629fae4",
    ),
    ("Proxy-Authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
    (f"sent the header 'Bearer {BEARER}' to the service", BEARER),
    ("X-Api-Key: 0a1b2c3d4e", "0a1b2c3d4e"),
    ("X-Auth-Token: 0a1b2c3d4e", "0a1b2c3d4e"),
    ("Cookie: session=abc; theme=dark", "session=abc"),
    ("Set-Cookie: sid=31d4d96e407aad42; Path=/", "31d4d96e407aad42"),
    # addresses
    ("postgres://bob:hunter2@db.example.org:5432/app", "hunter2"),
    ("https://x-access-token:p%40ss@w0rd@git.example.org/repo.git", "p%40ss"),
    ("https://x-access-token:p%40ss@w0rd@git.example.org/repo.git", "w0rd"),
    ("postgres://bob:hun/ter2@db.example.org:5432/app", "hun/ter2"),
    ("https://Ab3dEf6hIj9kLmNoPqRs@git.example.org/repo.git", "Ab3dEf6hIj9kLmNoPqRs"),
    (
        "https://0123456789abcdef0123456789abcdef@o1.ingest.sentry.io/2",
        "0123456789abcdef0123456789abcdef",
    ),
    (
        "https://api.telegram.org/bot1234567890:AAHdqTcvCH1vGWJxfSeofSAs0K5PALDsawx/getMe",
        "AAHdqTcvCH1vGWJxfSeofSAs0K5PALDsaw",
    ),
    (
        "https://discord.com/api/webhooks/123456789012345678/Ab3dEf6hIj9kLmNoPqRsTuVwXyZ-Ab3dEf",
        "Ab3dEf6hIj9k",
    ),
    ("GET /v1?access_token=abcdefgh&page=2", "abcdefgh"),
    ("GET /v1?key=abcd1234&page=2", "abcd1234"),
    ("https://blob.example.org/c?sv=2022&sig=aB3%2Fd9Z&se=1", "aB3%2Fd9Z"),
    ("https://s3.example.org/o?X-Amz-Signature=fe5f80f77d5fa3be", "fe5f80f77d5fa3be"),
    # prose and pairs
    ("authenticating: {user: bob, pass: hunter2}", "hunter2"),
    ("secret_key_base: 0a1b2c3d4e", "0a1b2c3d4e"),
]

ERRORS = "EPERM ENOENT EIO EACCES EBUSY EEXIST ENOTDIR EISDIR EINVAL EMFILE ETXTBSY ENOSPC EROFS EPIPE ENAMETOOLONG ELOOP"

ORDINARY = [
    r"net use \\srv\share * /user:bob",
    r"net use Z: \\srv\share /delete",
    "smbclient -U bob //srv/share",
    "sig=inspect.signature(f)",
    "token count: 12",
    "total_tokens: 1500, max_token: 4000",
    '{"token": 1500, "tokens": 20}',
    "unexpected token: semicolon",
    "the token: missing",
    "password: required",
    "password: None",
    "missing bearer token",
    "Bearer authentication is needed",
    "the bearer of bad news",
    "Basic authentication failed",
    "authorization: failed for bob",
    "secret santa: party at noon",
    "a secret: the recipe",
    "key: value, monkey: banana",
    "primary_key=id, foreign_key=user_id",
    "cookie: chocolate",
    "sk-learn-preprocessing-pipelines",
    "risk-management-framework-2024-edition",
    "task-force-report-number-one-hundred",
    "http://localhost:8080/announce",
    "https://example.org:443/a@b",
    "ssh://git@github.com:22/x",
    "see https://example.org/x?page=2&key=name",
    "next_page_token=abc123def456",
    "pad_token: <pad>, eos_token: </s>",
    "${build.output.token} and password={env:DB_PASSWORD} and token=${context.token}",
    "password=%s token=*** secret=<hidden>",
    'curl -H "Authorization: Bearer $TOKEN" -u bob:$PASSWORD --password $PW && TOKEN=$(cat token.txt) KEY_TOKEN=`pass show x`',
    "docker run --user 1000:1000 -u 0:0 image",
    "git push -u origin main",
    "3 passed, 1 failed; num_pass: 3",
    "PWD=/home/bob pwd=None ../pwd: here",
    "mysql -u root -p app, docker login -p, a machine with a login: password forgotten",
    "ssh://first.last@example.org and https://[::1]:80/@x",
    "the password is required, the password for bob: it is missing, a password 'for bob'",
    "echo done | tee log; openssl dgst -k; vault login -method=oidc; ldapsearch -x -W",
    'a token, value="high"; {"name": "token", "value": "on"}; 5 tests, pass: 4, pass: all of them',
    "eyJ is how JSON begins in base64",
    "-----BEGIN CERTIFICATE-----\nMIID\n-----END CERTIFICATE-----",
    "commit 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b",
    "0b9ee0b4-6f1d-4c5a-9f2e-0a1b2c3d4e5f",
    "sha256:9f86d08188" + "4b1d" + "659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "github.com/pkg/errors v0.9.1 h1:" + "AAFEdKdVu0yoBvMLkHyKYL8Az9dkoCCKVF3sxBz0r+8=",
    "token = get_token(user)\nsecret = self.secrets[0]\npassword = vault.read('db')\ncredentials = line[1:].split()",
    "token = lexeme, signature : Signature",
    '{"token": " tomorrow", "logprob": -0.2}',
    "cat: 'file:///etc/passwd': No such file or directory",
    "passwd: Authentication token manipulation error\npasswd: password unchanged, mkpasswd: command not found",
    "passwd: user 'bob' does not exist, error: password: authentication failed for user bob",
    "token: not found, token: required, password: Field required, password: must not be empty, passwd: Error 1",
    *(f"grep: /etc/passwd: {os.strerror(getattr(errno, name))}" for name in ERRORS.split()),
    "Größe: 12, 名前: 太郎, İstanbul",
]


@pytest.mark.parametrize("secret", BY_SHAPE)
@pytest.mark.parametrize(
    "frame",
    ["{}", "error: {} was refused", '{{"a": "{}"}}', "x={};", "https://h/p?a={}&b=1", "({})"],
)
def test_secret_by_its_shape(secret: str, frame: str):
    """What services hand out is taken out wherever it stands, and nothing else is; once is enough."""
    assert (
        REDACT.text(frame.format(secret)) == REDACT.text(frame.format(MASK)) == frame.format(MASK)
    )


@pytest.mark.parametrize("secret", [secret for secret in BY_SHAPE if "\n" not in secret])
def test_secrets_on_lines_of_their_own(secret: str):
    """A secret at the beginning of a line is taken out, whatever the line before ends in."""
    assert REDACT.text(f"{secret}\n{secret}\nnext\n{secret}\n") == f"{MASK}\n{MASK}\nnext\n{MASK}\n"


@pytest.mark.parametrize(("text", "secret"), BY_NAME)
def test_secret_by_its_name(text: str, secret: str):
    """What a text calls a secret is taken out; what it is called stays; once is enough."""
    clean = REDACT.text(text)
    assert secret not in clean
    assert MASK in clean
    assert text.startswith(clean.split(MASK)[0])
    assert REDACT.text(clean) == clean


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text(text: str):
    """Text without secrets stays as it is, also where it speaks of tokens, keys and passwords."""
    assert REDACT.text(text) == text


WORDS = st.sampled_from(
    ["token", "password", "=", ": ", " ", '"', "'", "\\", "[redacted]", "sk-", "eyJ", "://", "@", "-u ", "cookie",
     "authorization", "bearer ", "a1b2c3d4e5f6g7h8", "${", "}", "&", ";", ",", "\n", "x", "key", "api_", "--", "İ", "\ud800"]
)  # fmt: skip


class Word(str):
    """A text of a class of users."""

    __slots__ = ()


def test_text_of_a_class_of_users():
    """Secrets are taken out of texts of classes of users as well."""
    assert REDACT.value({"a": Word(f"Authorization: Bearer {BEARER}")}) == {
        "a": f"Authorization: Bearer {MASK}"
    }


@given(st.lists(WORDS, max_size=12).map("".join) | st.text())
def test_any_text_is_stable(text: str):
    """Whatever the text, the result is one that can be stored and is not changed by a second time."""
    clean = REDACT.text(text)
    assert clean.encode().decode() == clean
    assert REDACT.text(clean) == clean


@given(
    st.lists(WORDS | st.sampled_from([*TOKENS, *(text for text, _ in BY_NAME)]), max_size=12).map(
        "".join
    )
)
def test_search_for_hints(text: str):
    """The search for hints skips no text in which a rule finds a secret."""
    found = secrets.find_secrets(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secrets, "_FORMAT_HINT", re.compile(""))
        patch.setattr(secrets, "_NAME_HINT", re.compile(""))
        assert found == secrets.find_secrets(text)


def test_secrets_of_users():
    """Values and patterns of users are applied as well; longer values whole, short ones not at all."""
    redact = Redactor(["swordfish", "swordfish-and-more", "abc", "a.b*c("])
    assert redact.text("xswordfishx") == f"x{MASK}x"
    assert redact.text("swordfish-and-more!") == f"{MASK}!"
    assert redact.text("abc a.b*c( axbbc(") == f"abc {MASK} axbbc("
    assert all(redact.text(f"text {n}") == f"text {n}" for n in range(2_000)), (
        "however many texts are remembered"
    )
    redact = Redactor(["hunter2"], patterns=[r"INT-\d{4}", "x*"])
    assert (
        redact.text(f"see INT-1234, hunter2 and {BY_SHAPE[0]}") == f"see {MASK}, {MASK} and {MASK}"
    )


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        *((pattern, "") for pattern in (r"INT-\d{4}", r"(?<!a)b", r"(?P<a>x)(?P=a)", "")),
        *((pattern, "is not a regular expression: ") for pattern in ("x(", "[a", "*", "x{2}{3}")),
    ],
)
def test_patterns_of_users(pattern: str, problem: str):
    """A pattern is one of Python's `re`; one that is malformed is refused with the reason."""
    found = pattern_problem(pattern)
    assert found.startswith(problem)
    assert bool(found) == bool(problem)


def test_added_values():
    """A value that is added is masked from then on, beside those that were known."""
    redact = Redactor(["hunter2"])
    assert redact.text("swordfish") == "swordfish"
    assert redact.text("the key: swordfish") == "the key: swordfish"
    redact.add("swordfish")
    assert redact.text("swordfish hunter2") == f"{MASK} {MASK}"
    assert redact.text("the key: swordfish") == f"the key: {MASK}"


def test_many_texts():
    """However many texts were looked at before, a secret is found in the next one."""
    texts = [f"{number}: nothing to hide" for number in range(1_000)]
    assert list(map(REDACT.text, texts)) == texts
    assert REDACT.text("1000: password=hunter2") == f"1000: password={MASK}"


KNOWN = 's3cr3t "words" of mine'


@pytest.mark.parametrize("secret", [*TOKENS, KNOWN])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_every_wrapping(wrapping: str, secret: str):
    """Tokens and known values are masked in plain text, behind colours and behind the escapes of JSON; once is enough."""
    redact = Redactor([KNOWN])
    clean = redact.text(WRAPPINGS[wrapping](secret))
    assert MASK in clean
    assert not tells(clean, secret)
    assert redact.text(clean) == clean


def test_lines_of_known_values():
    """A known value of several lines is also masked line by line; short lines are not."""
    redact = Redactor(["{\n  line-of-a-secret\n}"])
    assert redact.text("{ line-of-a-secret }") == f"{{ {MASK} }}"


REFERENCES = [
    "Authorization: Bearer {env:SHOP_TOKEN}",
    "Authorization: key {env:KEY}",
    "Bearer {env:SHOP_TOKEN}",
    "Authorization: Bearer {token}",
    "Cookie: theme=dark; session={session-id}",
    "Cookie: session={env:SESSION}",
    "Cookie: session={env:SESSION}; theme={env:THEME}",
    "password={env:DB_PASSWORD}",
    "password=${login.output.password}",
    '{"token": "{env:TOKEN}", "api_key": "${build.output.key}"}',
    "https://bob:{env:PASSWORD}@example.org/",
    "curl --token {env:TOKEN} --password ${context.password}",
]


@pytest.mark.parametrize("text", REFERENCES)
def test_references(text: str):
    """A reference to a value is no secret, wherever it stands."""
    assert REDACT.text(text) == text
    member: JsonObject = {
        "authorization": text.rpartition(": ")[2],
        "cookie": text.rpartition(": ")[2],
    }
    assert REDACT.value(member) == member


def test_literal_parts_beside_references():
    """Beside a reference, the literal parts that look like secrets are masked."""
    assert (
        REDACT.text("Cookie: id=31d4d96e407a; session={env:SESSION}")
        == f"Cookie: id={MASK}; session={{env:SESSION}}"
    )
    assert REDACT.text(f"password={TOKENS[9]}${{a.output}}") == f"password={MASK}${{a.output}}"
    assert REDACT.value({"password": "Xy9{abc}Qw8"}) == {"password": MASK}
    assert REDACT.value({"cookie": "id=31d4d96e407a; s={env:S}"}) == {
        "cookie": f"id={MASK}; s={{env:S}}"
    }


class Report(BaseModel):
    """Part of a plugin's own, whose types are written in several ways."""

    count: int | None = None
    ratio: Annotated[float, "of one"] | None = None
    lines: list[Annotated[str, {"written": "by hand"}]] = []
    either: int | str = 0


def test_document_of_a_plugin():
    """Every field that may hold text is looked at, whatever its type looks like."""
    key = BY_SHAPE[0]
    report = Report(count=3, ratio=0.5, lines=[key, "a line"], either=key)
    clean = Report(count=3, ratio=0.5, lines=[MASK, "a line"], either=MASK)
    assert REDACT.document(report) == clean
    assert REDACT.document(clean) is clean


def test_document():
    """A plan loses the secrets in what it says, keeps its names and conditions, and is the same where it has none."""
    key = BY_SHAPE[0]
    task = Task(
        id=key,
        tool=key,
        name=key,
        when=f"context.x == '{key}'",
        arguments={"a": [key]},
        acceptance=(key, "b"),
        priority=3,
    )
    given = Plan(
        goal=Goal(objective=key), tasks=(task, Task(id="b", depends_on=(key,))), facts=("on",)
    )
    clean = REDACT.document(given)
    assert clean.goal.objective == clean.tasks[0].name == MASK
    assert (clean.tasks[0].arguments, clean.tasks[0].acceptance) == ({"a": [MASK]}, (MASK, "b"))
    assert (clean.tasks[0].id, clean.tasks[0].tool, clean.tasks[0].when) == (key, key, task.when)
    assert clean.tasks[1] is given.tasks[1]
    assert REDACT.document(clean) is clean
    change = ModifyTask(
        task_id=TaskId("a"), fields={"arguments": {"password": "hunter2"}, "priority": 3}
    )
    assert REDACT.document(change).fields == {"arguments": {"password": MASK}, "priority": 3}
    full = TriggerEvent.model_validate({"kind": "disk-full", "disk": "sda"})
    assert REDACT.document(full) is full
    leaking = TriggerEvent.model_validate({"kind": "disk-full", "password": "hunter2"})
    assert REDACT.document(leaking).model_extra == {"password": MASK}


SHAPED = "sk-" + "proj-Ab3dEf6hIj9kLmNoPqRsTuVwXyZ"
PLACES: dict[str, JsonObject] = {
    "id": {"id": SHAPED},
    "tasks[0].id": {"tasks": [{"id": f"build {SHAPED}"}]},
    "tasks[0].tool": {"tasks": [{"id": "a", "tool": SHAPED}]},
    "tasks[0].when": {"tasks": [{"id": "a", "when": f"context.stage == '{SHAPED}'"}]},
    "tasks[0].undo.tool": {"tasks": [{"id": "a", "undo": {"tool": SHAPED}}]},
    "tasks[0].fallbacks[0].tool": {"tasks": [{"id": "a", "fallbacks": [{"tool": SHAPED}]}]},
    "tasks[0].include.tasks[0].id": {
        "tasks": [{"id": "a", "include": {"tasks": [{"id": SHAPED}]}}]
    },
    "tasks[0].include.tasks[0].when": {
        "tasks": [
            {"id": "a", "include": {"tasks": [{"id": "b", "when": f"context.x == '{SHAPED}'"}]}}
        ]
    },
    "tools[0].name": {"tools": [{"name": SHAPED}]},
    "tools[0].capability": {"tools": [{"name": "a", "capability": SHAPED}]},
    'tools[0].parameters["[redacted]"]': {
        "tools": [{"name": "a", "parameters": {SHAPED: "string"}}]
    },
    'resources["[redacted]"]': {"resources": {SHAPED: 1}},
    'objects["[redacted]"]': {"objects": {SHAPED: "box"}},
    "objects.box": {"objects": {"box": "password=hunter2x"}},
    'mcp["[redacted]"]': {"mcp": {SHAPED: {"command": "x"}}},
    "tasks[1].id": {"tasks": [{"id": "a"}, {"id": "mine INT-123456"}]},
    "tasks[1].depends_on[0]": {
        "tasks": [{"id": "vault-word-1"}, {"id": "b", "depends_on": ["vault-word-1"]}]
    },
}


@pytest.mark.parametrize("place", PLACES)
def test_names_that_are_secrets(place: str):
    """Ids and other names with secrets by format, assigned, of users' patterns or known are reported by place alone."""
    plan = Plan.model_validate({"goal": {"objective": "x"}, **PLACES[place]})
    problems = secret_name_problems(plan, Redactor(["vault-word-1"], [r"INT-\d{6}"]))
    assert place in [problem.place for problem in problems]
    assert not any(word in str(problems) for word in ("Ab3d", "hunter2x", "INT-1", "vault"))


def test_values_of_parameters_of_an_included_plan():
    """The parameters of an included plan are masked like any other JSON, so that they are no names."""
    included = {"parameters": {"key": {"type": "string", "default": SHAPED}}, "tasks": []}
    document = {"goal": {"objective": "x"}, "tasks": [{"id": "a", "include": included}]}
    plan = Plan.model_validate(document)
    assert secret_name_problems(plan, Redactor()) == []
    assert SHAPED not in REDACT.document(plan).model_dump_json()


CHANGES: dict[str, JsonObject] = {
    "[0].task.id": {"kind": "add", "task": {"id": SHAPED}},
    "[0].before[0]": {"kind": "add", "task": {"id": "a"}, "before": [SHAPED]},
    "[0].task_id": {"kind": "skip", "task_id": SHAPED},
    "[0].tasks[1].depends_on[0]": {
        "kind": "replace",
        "task_id": "a",
        "tasks": [{"id": "b"}, {"id": "c", "depends_on": [SHAPED]}],
    },
    "[0].task.include.tasks[0].id": {
        "kind": "add",
        "task": {"id": "a", "include": {"tasks": [{"id": SHAPED}]}},
    },
    "[0].fields.tool": {"kind": "modify", "task_id": "a", "fields": {"tool": SHAPED}},
    "[0].fields.depends_on[0]": {
        "kind": "modify",
        "task_id": "a",
        "fields": {"depends_on": [SHAPED]},
    },
    "[0].fields.when": {
        "kind": "modify",
        "task_id": "a",
        "fields": {"when": f"context.stage == '{SHAPED}'"},
    },
    "[0].order[0]": {"kind": "reorder", "order": [SHAPED, "a"]},
}


@pytest.mark.parametrize("place", CHANGES)
def test_names_in_changes_that_are_secrets(place: str):
    """Ids and other names in changes are reported by place alone, as in a plan."""
    changes = parse_changes([CHANGES[place]])
    problems = secret_name_problems(changes, Redactor())
    assert place in [problem.place for problem in problems]
    assert "Ab3d" not in str(problems)


NAMES = f"""
load-9f86d081884c7d65 task-123e4567-e89b-12d3-a456-426614174000 123e4567-e89b-12d3-a456-426614174000 refresh-token
sha256:{"9f86d081884c7d659a2feaa0c55ad015" * 2} get_api_key rotate-password:monthly cache-key:9f86d081884c7d659a2f t1~2
risk-assessment-of-all-suppliers-2026 disk-cleanup-on-all-the-hosts task-sk-de-cs-Übersetzung LoadOrdersFromWarehouse12
deploy@eu-west-1 build/linux/amd64 step.1.2 web.search npm_install_dependencies 01HZX3V7Q8J9K2M4N5P6R7S8T9 A1B2C3D4E5F6
heroku:123e4567-e89b-12d3-a456-426614174000
github_pat_rotation_for_all_repositories
pypi-publish-the-package-to-the-main-registry secret-scan:report shard=3 stage:eu
"""


def test_ordinary_names():
    """Ids with hashes, UUIDs, words of prose, and names that speak of tokens and passwords, are names."""
    redact, words = (
        Redactor(),
        (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split(),
    )
    names = [
        *NAMES.split(),
        "Rotate the password: monthly",
        "at(robot, hall 3)",
        "Ship it: token, keys and all",
        *words,
    ]
    tasks = [
        {"id": name, "when": "context.password == 'new' and context.api_key != 'old-one'"}
        for name in set(names)
    ]
    assert (
        secret_name_problems(
            Plan.model_validate({"goal": {"objective": "x"}, "tasks": tasks}), redact
        )
        == []
    )


def test_parts_of_secrets_and_characters():
    """A private key that was cut is taken out to its last line or the end of the text; halves of characters become a mark."""
    assert REDACT.text(f"key:\n{PEM[:60]}") == f"key:\n{MASK}"
    assert REDACT.text(f"key:\n{PEM[:-9]}\nand then") == f"key:\n{MASK}\nand then"
    ssh = "---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----\nP2/56wAAA\n---- END SSH2 ENCRYPTED PRIVATE KEY ----"
    assert REDACT.text(f"key: {ssh}\nand then") == f"key: {MASK}\nand then"
    assert REDACT.text("a \udcff name") == "a \ufffd name"
    assert REDACT.text("\U0001f600 \ud83d\ude00") == "\U0001f600 \U0001f600"


SECRET_NAMES = """
password db_password apiKey api_key client_secret aws_secret_access_key AccessToken token Authorization Set-Cookie
x-api-key private_key signature credentials mysql_pwd passphrase
"""


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_member_that_is_called_a_secret(name: str):
    """A member of an object whose name means a secret loses its text, also inside lists."""
    secret = "abcd1234efgh"
    assert REDACT.value({name: secret, "other": 1}) == {name: MASK, "other": 1}
    assert REDACT.value({f"{name}\n": secret}) == {f"{name}\n": MASK}
    assert REDACT.value([{"deep": {name: [secret, [secret]]}}]) == [
        {"deep": {name: [MASK, [MASK]]}}
    ]


@pytest.mark.parametrize(
    "value",
    [
        {
            "next_page_token": "abc123def456",
            "eos_token": "<|end|>",
            "token": "international",
            "tokens": ["a1b2c3d4"],
        },
        {
            "token": 1500,
            "max_token": "4096",
            "password": None,
            "has_password": "true",
            "monkey": "abcd1234",
        },
        {
            "primary_key": "abcd1234",
            "pwd": "/home/bob",
            "secretary": "Ms. Moneypenny",
            "authorization": "none",
        },
        {"password": True, "a": [1, 2.5, None, True, {"b": ["text", {}]}], "c": []},
        {"password": "{env:DB_PASSWORD}"},
        {"password": ""},
        {"parameters": {"token": "string", "api_key": "any", "password": "object"}},
    ],
)
def test_member_that_is_no_secret(value: JsonObject):
    """References, places in lists, words of language models, numbers and absent values stay."""
    before = json.dumps(value)
    assert json.dumps(REDACT.value(value)) == json.dumps(value) == before


@pytest.mark.parametrize(
    ("value", "clean"),
    [
        ({"password": 123456, "pin": 7}, {"password": MASK, "pin": 7}),
        (
            {"credentials": {"user": "bob", "password": "x1"}},
            {"credentials": {"user": "bob", "password": MASK}},
        ),
        (
            {"postgres://a:hunter2@h": 1, "postgres://a:hunter3@h": 2, "x": 3},
            {f"postgres://a:{MASK}@h": 1, f"postgres://a:{MASK}@h 2": 2, "x": 3},
        ),
    ],
    ids=["a number", "an object", "names"],
)
def test_members(value: JsonObject, clean: JsonObject):
    """Numbers are secrets where they are called passwords, objects are not; names lose secrets, and none is lost."""
    assert REDACT.value(value) == clean


HOSTILE = [
    "eyJ-", "eyJaaaaaaaa.", "sk-", "sk-a", "a.", "token=", "token=" + "," * 50, "token=${", "page_token=", "://", "://a:",
    "-----BEGIN ", "-----BEGIN PRIVATE KEY-----", "token ", 'token="', 'token="a', "authorization: ", "bearer ", "\\",
    "token\\\\", "-u a:", "-u ", "_", "_pass", "xox", "xoxb-", "cookie: a=", "cookie: a", "--token ", "secret_key",
    "authorization: digest ", "token: 1234567 ", "password: none", "İtoken", "aws4-hmac-sha256 ", "=", ">", "api_key>",
    "machine a login b ", "mysql a ", "redis-cli ", "://a:b/", "curl -u a:b ", "net use \\", "smbclient -ua", "smb -u a%", 'key="a1b2c3d4e5f6g7";', "kind: secret data: ",
    "key", "key=", "mysql ", "mysqldump -a ", "docker login ", "--", "--key ", "AKIAIOSFODNN7EXAMPLE ",
    "\\u0061", "%41", "%", "\x1b[", "\x1b]", "&#97;", "&", "\u200b", "cGFzc3dvcmQ9aHVudGVyMiBw ", "eyeya",
]  # fmt: skip


def test_values_without_end():
    """A value that is nested more deeply than any journal could keep is refused by name."""
    deep: list[JsonValue] = []
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    with pytest.raises(RecordNotSerializable, match="nested too deeply"):
        REDACT.value(deep)


def test_members_without_a_name():
    """A trigger of somebody's own class is refused if a member of its objects has no text as name."""
    trigger = TriggerEvent.model_validate({"kind": "disk-full", "free": {5: "GB"}})
    with pytest.raises(RecordNotSerializable, match="5 cannot name a member of a JSON object"):
        REDACT.document(trigger)


@pytest.mark.parametrize("part", HOSTILE)
def test_time_grows_with_length_alone(part: str):
    """Hostile text of four times the length takes four times the steps, not sixteen."""
    small, large = (part * (size // len(part)) for size in (5_000, 20_000))
    REDACT.text(large)  # which compiles patterns
    assert calls(lambda: REDACT.text(large)) <= 5 * calls(lambda: REDACT.text(small)) + 200


@pytest.mark.parametrize("size", [0, 60, 1_000, 10_000])
def test_errors_about_plans(size: int):
    """An error that quotes a wrong value, also a long one, tells neither a secret in it nor half of one."""
    text = f"{'x ' * size}{BY_SHAPE[4]} {JWT} {BY_SHAPE[4]}{' x' * size}\n\0"
    with pytest.raises(PlanError) as caught:
        Plan.model_validate(
            {"goal": {"objective": text}, "tasks": [{"id": "a", "depends_on": {text: text}}]}
        )
    assert not any(BY_SHAPE[4][at : at + 12] in str(caught.value) for at in range(20))
    assert not any(JWT[at : at + 12] in str(caught.value) for at in range(60))


def test_the_manual_of_python():
    """In the manual of Python, 65,000 words of prose and code, nothing is taken for a secret."""
    manual = "\n".join(pydoc_data.topics.topics.values())
    assert len(manual.split()) > 50_000
    assert REDACT.text(manual) == manual


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("token\\u003dab12cd34ef\\nnext", f"token\\u003d{MASK}\\nnext"),
        (f"x \\u{ord(SHAPED[0]):04x}{SHAPED[1:]} y", f"x {MASK} y"),
        (f"x {SHAPED[:-1]}\\u{ord(SHAPED[-1]):04x} y", f"x {MASK} y"),
        (
            "\x1b[1mpassword\x1b[0m: \x1b[31mhunter2\x1b[0m, x",
            f"\x1b[1mpassword\x1b[0m: \x1b[31m{MASK}\x1b[0m, x",
        ),
        ("\x1b]0;title\x07pass\x1b(Bword=hunter2", f"\x1b]0;title\x07pass\x1b(Bword={MASK}"),
    ],
)
def test_what_is_masked_behind_escapes(text: str, clean: str):
    """What is found behind escapes is masked where it came from, and what surrounds it stays as it was written."""
    assert REDACT.text(text) == clean


def test_patterns_of_users_beyond_ascii():
    """A pattern finds its matches where they are, also behind other letters and far into a text."""
    redact = Redactor(patterns=["INT-[0-9]{4}", "Schlüssel: [a-z]+"])
    text = "ünïcödé INT-1234, Schlüssel: geheim. " * 1_000
    assert redact.text(text) == f"ünïcödé {MASK}, {MASK}. " * 1_000
    assert redact.text("x" * 20_000 + "INT-1234") == "x" * 20_000 + MASK


@pytest.mark.deep
def test_hashes_and_images():
    """Of ten thousand hashes and ids as lock files hold them, and 5 MB of an image in base64, none is taken for a secret."""
    chance = random.Random(4)
    forms: list[Callable[[bytes], str]] = [
        lambda data: data[:20].hex(),
        lambda data: f"sha256:{data[:32].hex()}",
        lambda data: str(uuid.UUID(bytes=data[:16])),
        lambda data: f"sha512-{base64.b64encode(data).decode()}",
        lambda data: f"h1:{base64.b64encode(data[:32]).decode()}",
    ]
    text = "\n".join(f"name {form(chance.randbytes(64))}" for form in forms for _ in range(2_000))
    assert REDACT.text(text) == text
    image = base64.b64encode(chance.randbytes(4_000_000)).decode()
    assert REDACT.text(image) == image
