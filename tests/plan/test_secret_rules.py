"""Secrets are found by the rules of a maintained collection, and through escapes, colours and encodings."""

import base64
import hashlib
import pydoc_data.topics
import random
import sys
import uuid
from collections.abc import Callable
from importlib import resources
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning.plan.redaction import Redactor
from replanning.plan.secrets import MASK
from tests.support.secret_examples import NOT_IN_WORDS, WRAPPINGS, collection, examples, tells

REDACT = Redactor()


def test_the_collection_is_what_the_script_wrote() -> None:
    """The rules are those that `scripts/import_secret_rules.py` makes of its pinned release, unedited."""
    data = (resources.files("replanning.plan") / "secret_rules.json").read_bytes()
    assert (
        hashlib.sha256(data).hexdigest()
        == "f1b0dc7e8c6b87061fd7e20c8ced5b6464ef2f20e94c9b08b556b89c572ddb89"
    )
    assert "MIT" in collection()["license"]
    assert len(collection()["rules"]) == len(examples()) == 221


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_every_rule_in_every_wrapping(wrapping: str) -> None:
    """An example of each rule of the collection is taken out in each wrapping, and once is enough."""
    left = {}
    for rule, text, secret in examples():
        clean = REDACT.text(WRAPPINGS[wrapping](text))
        if (tells(clean, secret) or REDACT.text(clean) != clean) and not (
            "glued" in wrapping and rule in NOT_IN_WORDS
        ):
            left[rule] = clean
    assert left == {}


def test_two_commands_with_a_login() -> None:
    """A rule that bridges several lines finds the secret in each of them."""
    text = Redactor().text(
        "it says curl\nc --user='eUf*I*':9hZM here\ncurl\nc --user='xUf*I*':8hZM\n"
    )
    assert ("9hZM" in text, "8hZM" in text) == (False, False)


@pytest.mark.parametrize(
    "text", ["context-key passwdaK6\"':=%s", 'key: api.key.access_token := "%s"']
)
def test_name_behind_a_name(text: str) -> None:
    """The value of a name is found also where another name, without a value of its own, stands before it."""
    assert "g97gw" not in Redactor().text(text % "g97gw+ncicy3dx")


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_known_values_in_every_wrapping(wrapping: str) -> None:
    """A secret that is known by value is found in each wrapping, without the blanks at its ends, and line by line."""
    secret = 'swörd/fish "4711" 🔑'
    redact = Redactor([f"{secret}\n", f"first-line-of-it\n  {secret}=second\r\n"])
    wrap = WRAPPINGS[wrapping]
    for text in (secret, "first-line-of-it", f"{secret}=second"):
        assert not tells(redact.text(wrap(text)), text)
        assert MASK in redact.text(wrap(text))


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("token\\u003dab12cd34ef\\nnext", f"token\\u003d{MASK}\\nnext"),
        (
            "\x1b[1mpassword\x1b[0m: \x1b[31mhunter2\x1b[0m, x",
            f"\x1b[1mpassword\x1b[0m: \x1b[31m{MASK}\x1b[0m, x",
        ),
        ("q=%70assword%3Dhunter2%26x%3D1", f"q=%70assword%3D{MASK}%26x%3D1"),
        ("password&#61;hunter2&amp;x=1", f"password&#61;{MASK}&amp;x=1"),
        ("pass\u200bword: hunter2", f"pass\u200bword: {MASK}"),
        ("export PASSWORD=\\\nhunter2", f"export PASSWORD=\\\n{MASK}"),
        ("\\033[1mpassword=hunter2\\033[0m", f"\\033[1mpassword={MASK}\\033[0m"),
        ("\x1b]0;title\x07pass\x1b(Bword=hunter2", f"\x1b]0;title\x07pass\x1b(Bword={MASK}"),
        (
            r"\x70assword=hunter2 \ud83d\ude00 \ud83d \q",
            rf"\x70assword={MASK} \ud83d\ude00 \ud83d \q",
        ),
        ("powershell -e cABhAHMAcwB3AG8AcgBkAD0AaAB1AG4AdABlAHIAMgA=", f"powershell -e {MASK}"),
        ("a/b/c/d/e/f/g/h/i/j/k/l/m %zz \\ & &none;", "a/b/c/d/e/f/g/h/i/j/k/l/m %zz \\ & &none;"),
    ],
)
def test_what_is_masked_of_encoded_text(text: str, clean: str) -> None:
    """What is found in decoded text is masked where it came from, and what surrounds it stays as it was written."""
    assert REDACT.text(text) == clean


def test_ordinary_text() -> None:
    """In the manual of Python, 65,000 words of prose and code, nothing is taken for a secret."""
    manual = "\n".join(pydoc_data.topics.topics.values())
    assert len(manual.split()) > 50_000
    assert REDACT.text(manual) == manual


ESCAPES = st.sampled_from(["\\", "n", "u003d", "%", "41", "3D", "\x1b", "[0m", "]", "&", "#61;", "\u200b", "password", "=",
                           "hunter2", "cGFzc3dvcmQ9aHVudGVyMiE", "\n", "key", ":", '"', "a1b2c3d4e5f6g7", "[redacted]"])  # fmt: skip


@given(st.lists(ESCAPES, max_size=14).map("".join))
def test_encoded_text_is_stable(text: str) -> None:
    """Whatever is encoded in a text, a second time changes nothing."""
    clean = REDACT.text(text)
    assert REDACT.text(clean) == clean


def test_patterns_of_users_beyond_ascii() -> None:
    """A pattern finds its matches where they are, also behind other letters and far into a text."""
    redact = Redactor(patterns=["INT-[0-9]{4}", "Schlüssel: [a-z]+"])
    text = "ünïcödé INT-1234, Schlüssel: geheim. " * 1_000
    assert redact.text(text) == f"ünïcödé {MASK}, {MASK}. " * 1_000
    assert redact.text("x" * 20_000 + "INT-1234") == "x" * 20_000 + MASK


@pytest.mark.deep
@pytest.mark.deep
def test_hashes_and_images() -> None:
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


@pytest.mark.deep
@given(
    st.integers(0, 10_000), st.sampled_from(sorted(WRAPPINGS)), st.sampled_from(sorted(WRAPPINGS))
)
def test_two_wrappings(number: int, inner: str, outer: str) -> None:
    """A secret is found behind any encoding within any other."""
    rule, text, _ = examples()[number % len(examples())]
    if (rule in NOT_IN_WORDS and "glued" in inner + outer) or "in JSON" in inner + outer:
        return
    clean = REDACT.text(WRAPPINGS[outer](WRAPPINGS[inner](text)))
    assert MASK in clean


@pytest.mark.deep
def test_sources() -> None:
    """Of half a million words of source, few are taken for secrets: values that are assigned to passwords and tokens."""
    folder = resources.files("json").parent  # type: ignore[attr-defined]
    files = islice(sorted(folder.glob("*.py")), 200)
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
    assert len(text) > 3_000_000, sys.version
    assert REDACT.text(text).count(MASK) < 40
