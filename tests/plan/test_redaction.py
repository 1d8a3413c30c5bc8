"""Secrets are taken out of text and values, and ordinary text stays as it is."""

import base64
import errno
import json
import os
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from replanning import Goal, Plan, PlanError, Task
from replanning.changes import ModifyTask
from replanning.errors import RecordNotSerializable
from replanning.plan import secrets as _secrets
from replanning.plan.masking import mask
from replanning.plan.redaction import Redactor, pattern_problem
from replanning.plan.secrets import MASK
from replanning.plan.types import JsonObject, TaskId
from tests.support.cost import calls, ordinary_seconds
from tests.support.secret_examples import collection

REDACT = Redactor()
BEARER = "mF_9.B5f-4.1JqM"
JWT = "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9P"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEowIBAAKCAQEA\nq83J\n-----END RSA PRIVATE KEY-----"

# The bars are taken out below: programs that look for leaked secrets read tests as well.
BARRED = [
    "sk-proj-|Ab3dEf6hIj9kLmNoPqRsTuVwXyZ",
    "sk-ant-|api03-Zx8-Yw7_Vu6Ts5Rq4Po3Nm2",
    "sk-|abcdefghijklmnopqrstuvwx",
    "sk_live_|4eC39HqLyjWDarjtT1zdp7dc",
    "whsec_|MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
    "ghp_|16C7e42F292c6912E7710c838347Ae178B4a",
    "ghs_|16C7e42F292c6912E7710c838347Ae178B4a",
    "github_pat_|11ABCDEFG0aBcDeFgHiJkL_mNoPqRsTuVwXyZ",
    "glpat-|Ab1Cd2Ef3Gh4Ij5Kl6Mn",
    "xoxb-|123456789012-abcdefGHIJKL",
    "hooks.slack.com/|services/T00000000/B00000000/XXXXXXXXXXXXXXXXXXXXXXXX",
    "AKIA|IOSFODNN7EXAMPLE",
    "ASIA|IOSFODNN7EXAMPLE",
    "AIza|SyD-9tSrke72PouQMnMX-a7eZSW0jkFMBWY",
    "ya29.|a0AfH6SMBx-Zq3_example1234567890",
    "hf_|AbCdEfGhIjKlMnOpQrStUvWx",
    "npm_|AbCdEfGhIjKlMnOpQrStUvWxYz0123456789",
    "pypi-|AgEIcHlwaS5vcmcCJGFiY2RlZmdoLWlqa2wtbW5vcC1xcnN0",
    "gsk_|x8Ab3dEf6hIj9kLmNoPqRsTuVwXyZAb3dEf6hIj9kLmNoPqRsTuVw",
    "dckr_pat_|Ab3dEf6hIj9kLmNoPqRsTuVwXyZ",
    "hvs.|CAESIAb3dEf6hIj9kLmNoPqRsTuVwXyZ",
    "xapp-|1-A0B1C2D3E4F-1234567890123-0123456789abcdef0123456789abcdef",
    "SG.|ngeVfQFYQlKU0ufo8x5d1A.TwL2iGABf9DHoTf-09kqeF8tAmbihYzrnopKc-1s5cr",
    "dop_v1_|0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
    "shpat_|0123456789abcdef0123456789abcdef",
    "AGE-SECRET-KEY-|1QL3Z7HJY54PW3HYWW5AYYFG7ZQGVC7W3J2ELW8ZMRJ2KG5SFN9AQMCAC8P",
    JWT,
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nlQOYBF\n=aBcD\n-----END PGP PRIVATE KEY BLOCK-----",
    PEM,
]
BY_SHAPE = [secret.replace("|", "") for secret in BARRED]

BY_NAME = [
    # prose and logs
    ("login failed, password: hunter2", "hunter2"),
    ("passwd = s3cr3t", "s3cr3t"),
    ("cat /etc/passwd: hunter2x", "hunter2x"),
    ("'passwd': swordfish, for you", "swordfish"),
    ("password: no", "no"),
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
    ("curl -u bob:hunter2 https://example.org", "hunter2"),
    ("curl --proxy-user bob:hunter2 https://example.org", "hunter2"),
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
    ("machine example.org login bob password hunter2", "hunter2"),
    ("machine example.org\n\tlogin bob\n\tpassword hunter2\n", "hunter2"),
    ("login bob\n\tpassword hunter2\n", "hunter2"),
    ("default login bob password hunter2", "hunter2"),
    # commands
    ("sshpass -p hunter2 ssh bob@example.org", "hunter2"),
    ("sshpass -e -p 'hunter 2' ssh bob@example.org", "hunter 2"),
    ("mysql -u root -phunter2 app", "hunter2"),
    ("redis-cli -h db -a hunter2 ping", "hunter2"),
    ("docker login -u bob -p hunter2 example.org", "hunter2"),
    (r"net use \\srv\share hunter2 /user:bob", "hunter2"),
    (r"NET USE Z: \\srv\share /USER:DOM\bob 'hunter 2'", "hunter 2"),
    ("smbclient //srv/share -U bob%hunter2 -c ls", "hunter2"),
    ("smbget --user='bob%hunter 2' smb://srv", "hunter 2"),
    ("rpcclient -Ubob%hunter2 srv", "hunter2"),
    ("sig=lJzRc1YdHaAA2KCNJJ1tkYwF%2FmKK6Y%3D&se=2030-01-01", "lJzRc1YdHaAA2KCNJJ1tkYwF"),
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
    ("jdbc:oracle:thin:scott/hunter2@//db:1521/x", "hunter2"),
    # prose and pairs
    ("Logging in as 'bob' with password 'hunter2'", "hunter2"),
    ("Your temporary password is: hunter22", "hunter22"),
    ("Password for 'https://bob@example.org': hunter22", "hunter22"),
    ("authenticating: {user: bob, pass: hunter2}", "hunter2"),
    ('<add key="ApiSecret" value="hunter2"/>', "hunter2"),
    ('{"name": "DB_PASSWORD", "value": "hunter2"}', "hunter2"),
    ("secret_key_base: 0a1b2c3d4e", "0a1b2c3d4e"),
    # further options
    ("ldapsearch -D cn=admin -w hunter2 -b dc=x", "hunter2"),
    ("openssl enc -aes-256-cbc -k hunter2 -in a", "hunter2"),
    ("openssl rsa -passin pass:hunter2 -in k.pem", "hunter2"),
    ("keytool -list -storepass hunter2", "hunter2"),
    ("vault login hunter22", "hunter22"),
    ("echo hunter2 | docker login --password-stdin", "hunter2"),
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
def test_secret_by_its_shape(secret: str, frame: str) -> None:
    """What services hand out is taken out wherever it stands, and nothing else is; once is enough."""
    assert (
        REDACT.text(frame.format(secret)) == REDACT.text(frame.format(MASK)) == frame.format(MASK)
    )


@pytest.mark.parametrize("secret", [secret for secret in BY_SHAPE if "\n" not in secret])
def test_secrets_on_lines_of_their_own(secret: str) -> None:
    """A secret at the beginning of a line is taken out, whatever the line before ends in."""
    assert REDACT.text(f"{secret}\n{secret}\nnext\n{secret}\n") == f"{MASK}\n{MASK}\nnext\n{MASK}\n"


@pytest.mark.parametrize(("text", "secret"), BY_NAME)
def test_secret_by_its_name(text: str, secret: str) -> None:
    """What a text calls a secret is taken out; what it is called stays; once is enough."""
    clean = REDACT.text(text)
    assert secret not in clean
    assert MASK in clean
    assert text.startswith(clean.split(MASK)[0])
    assert REDACT.text(clean) == clean


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_text(text: str) -> None:
    """Text without secrets stays as it is, also where it speaks of tokens, keys and passwords."""
    assert REDACT.text(text) == text


WORDS = st.sampled_from(
    ["token", "password", "=", ": ", " ", '"', "'", "\\", "[redacted]", "sk-", "eyJ", "://", "@", "-u ", "cookie",
     "authorization", "bearer ", "a1b2c3d4e5f6g7h8", "${", "}", "&", ";", ",", "\n", "x", "key", "api_", "--", "İ", "\ud800"]
)  # fmt: skip


RULE_PATTERNS = [rule.pattern.pattern for rule in (*_secrets.FORMAT_RULES, *_secrets.NAME_RULES)]
RULE_WORDS = re.findall(
    r"\w{1,13}", " ".join([*RULE_PATTERNS, *(rule["regex"] for rule in collection()["rules"])])
)


class Word(str):
    """A text of a class of users."""

    __slots__ = ()


def test_text_of_a_class_of_users() -> None:
    """Secrets are taken out of texts of classes of users as well."""
    assert REDACT.value({"a": Word(f"Authorization: Bearer {BEARER}")}) == {
        "a": f"Authorization: Bearer {MASK}"
    }


@given(
    st.lists(st.sampled_from(sorted({*RULE_WORDS})) | st.from_regex(r"\w{1,13}", fullmatch=True)),
    st.sampled_from([" ", ". ", "! ", "? ", ".", "-", ", ", "\n"]),
)
def test_simple_text(words: list[str], sign: str) -> None:
    """A text that is taken to be simple has no secret that a rule would find, whatever words of rules it has."""
    text = sign.join(words)
    assert not _secrets.is_simple(text) or mask(text, _secrets.find_secrets) is text


@given(st.lists(WORDS, max_size=12).map("".join) | st.text())
def test_any_text_is_stable(text: str) -> None:
    """Whatever the text, the result is one that can be stored and is not changed by a second time."""
    clean = REDACT.text(text)
    assert clean.encode().decode() == clean
    assert REDACT.text(clean) == clean


def test_secrets_of_users() -> None:
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


NESTED = (
    r"(a+)+ (?:{}+)* ([(]a+[)])+ (a*)*b (?:\d+-)+x (a{1,3})+ ((a|b)*c){2,} (?:x(?:y|z+))* (a*){40}"
)
BEYOND = r"(?=(a+?))* (?<!a)b (?P<a>x)(?P=a) (a)\1 (?>a+) a++ ((a{100}){100}){100}"
USABLE = r"INT-\d{4} (?:ab)+ (?:\d{4}-){3}\d+ (ab?)+ \w+\d+ (a+){2} a|b* [^[]"
MALFORMED = "x( [a [[ * (?P<a>x)(?P<a>y) x{99999999999999999999}"
AMBIGUOUS = "[[:alpha:]]{20} a[[b] [a||b]"


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        *((pattern, "") for pattern in [*NESTED.split(), *USABLE.split(), ""]),
        *((pattern, "cannot be matched in linear time") for pattern in BEYOND.split()),
        *((pattern, "is no regular expression: ") for pattern in MALFORMED.split()),
        *((pattern, "does not mean what it seems to (possible ") for pattern in AMBIGUOUS.split()),
        ("x" * 1001, "has 1001 characters; at most 1000 are allowed"),
        ("(?x)(a+ # )\n)+", "cannot be matched in linear time"),
    ],
)
def test_patterns_that_cannot_be_used(pattern: str, problem: str) -> None:
    """Patterns that take more than linear time, are malformed, or mean something else elsewhere are refused."""
    told = pattern_problem(pattern)
    assert told.startswith(problem)
    assert bool(told) == bool(problem)
    if "seems to" in told:
        assert pattern_problem(pattern.replace("[[", r"[\[").replace("||", r"\|\|")) == ""


@pytest.mark.parametrize("pattern", NESTED.split())
def test_patterns_of_users_take_linear_time(pattern: str) -> None:
    """A pattern that repeats a repetition is matched like any other, whatever the text."""
    redact = Redactor(patterns=[pattern])
    assert redact.text("a" * 100_000 + "!").endswith("!")
    assert redact.text("1-" * 50_000 + "!").endswith("!")


def test_document() -> None:
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


SHAPED = "sk-" + "proj-Ab3dEf6hIj9kLmNoPqRsTuVwXyZ"
PLACES: dict[str, JsonObject] = {
    "id": {"id": SHAPED},
    "tasks[0].id": {"tasks": [{"id": f"build {SHAPED}"}]},
    "tasks[0].tool": {"tasks": [{"id": "a", "tool": SHAPED}]},
    "tasks[0].when": {"tasks": [{"id": "a", "when": f"context.stage == '{SHAPED}'"}]},
    "tasks[0].undo.tool": {"tasks": [{"id": "a", "undo": {"tool": SHAPED}}]},
    "tasks[0].fallbacks[0].tool": {"tasks": [{"id": "a", "fallbacks": [{"tool": SHAPED}]}]},
    "tools[0].name": {"tools": [{"name": SHAPED}]},
    "tools[0].capability": {
        "tools": [{"name": "a", "capability": base64.b64encode(SHAPED.encode()).decode()}]
    },
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
def test_names_that_are_secrets(place: str) -> None:
    """Ids and other names with secrets by format, assigned, of users' patterns or known are reported by place alone."""
    plan = Plan.model_validate({"goal": {"objective": "x"}, **PLACES[place]})
    problems = Redactor(["vault-word-1"], [r"INT-\d{6}"]).name_problems(plan)
    assert place in [problem.place for problem in problems]
    assert not any(word in str(problems) for word in ("Ab3d", "hunter2x", "INT-1", "vault"))


NAMES = f"""
load-9f86d081884c7d65 task-123e4567-e89b-12d3-a456-426614174000 123e4567-e89b-12d3-a456-426614174000 refresh-token
sha256:{"9f86d081884c7d659a2feaa0c55ad015" * 2} get_api_key rotate-password:monthly cache-key:9f86d081884c7d659a2f t1~2
risk-assessment-of-all-suppliers-2026 disk-cleanup-on-all-the-hosts task-sk-de-cs-Übersetzung LoadOrdersFromWarehouse12
deploy@eu-west-1 build/linux/amd64 step.1.2 web.search npm_install_dependencies 01HZX3V7Q8J9K2M4N5P6R7S8T9 A1B2C3D4E5F6
heroku:123e4567-e89b-12d3-a456-426614174000
github_pat_rotation_for_all_repositories
pypi-publish-the-package-to-the-main-registry secret-scan:report shard=3 stage:eu
"""


def test_ordinary_names() -> None:
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
        redact.name_problems(Plan.model_validate({"goal": {"objective": "x"}, "tasks": tasks}))
        == []
    )


def test_parts_of_secrets_and_characters() -> None:
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
def test_member_that_is_called_a_secret(name: str) -> None:
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
    ],
)
def test_member_that_is_no_secret(value: JsonObject) -> None:
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
def test_members(value: JsonObject, clean: JsonObject) -> None:
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


def test_values_without_end() -> None:
    """A value that is nested more deeply than any journal could keep is refused by name."""
    deep: list[JsonValue] = []
    for _ in range(sys.getrecursionlimit()):
        deep = [deep]
    with pytest.raises(RecordNotSerializable, match="nested too deeply"):
        REDACT.value(deep)


@pytest.mark.parametrize("part", HOSTILE)
def test_time_grows_with_length_alone(part: str) -> None:
    """Hostile text of four times the length takes four times the steps, not sixteen."""
    small, large = (part * (size // len(part)) for size in (5_000, 20_000))
    REDACT.text(large)  # which compiles patterns
    assert calls(lambda: REDACT.text(large)) <= 5 * calls(lambda: REDACT.text(small)) + 200


@pytest.mark.parametrize("size", [0, 60, 1_000, 10_000])
def test_errors_about_plans(size: int) -> None:
    """An error that quotes a wrong value, also a long one, tells neither a secret in it nor half of one."""
    text = f"{'x ' * size}{BY_SHAPE[4]} {JWT} {BY_SHAPE[4]}{' x' * size}\n\0"
    with pytest.raises(PlanError) as caught:
        Plan.model_validate(
            {"goal": {"objective": text}, "tasks": [{"id": "a", "depends_on": {text: text}}]}
        )
    assert not any(BY_SHAPE[4][at : at + 12] in str(caught.value) for at in range(20))
    assert not any(JWT[at : at + 12] in str(caught.value) for at in range(60))


@pytest.mark.slow
@pytest.mark.parametrize("part", HOSTILE)
def test_time_for_a_megabyte(part: str) -> None:
    """A megabyte of any hostile text takes about a second of an ordinary machine."""
    text = part * (1_000_000 // len(part))
    assert ordinary_seconds(lambda: REDACT.text(text)) < 3


@pytest.mark.parametrize("rule", _secrets.NAME_RULES, ids=lambda rule: rule.hint)
def test_rules_by_name_are_bounded(rule: _secrets.SecretRule) -> None:
    """A rule that fails has read a bounded piece of text; those by shape fail on short runs of characters alone."""
    widest = import_module("re._parser").parse(rule.pattern.pattern).getwidth()[1]
    assert widest < 10_000


def test_wrapped_at_blanks_and_within_words():
    """A secret that a logger has wrapped both at a blank and within a word is masked, and bars that belong to it are no frame."""
    lines = [
        "12:30 INFO  Tool failed: sent  server.py:453",
        "            bitbucket",
        "            ||'67abefzf8ebclqa              ",
        "            nc6kpl8ankbqra8ggv              ",
        "            hokj4ckyxxh6xb0tce              ",
        "            bz3mopfhu5xyz to a",
        "            server",
    ]
    wrapped = "\n".join(lines)
    assert Redactor().text(wrapped) == wrapped
    clean = Redactor().text(wrapped, wrapped=True)
    assert not any(part in clean for part in ("67abefzf", "nc6kpl8a", "hokj4cky", "bz3mop"))
    assert clean.endswith("server")
