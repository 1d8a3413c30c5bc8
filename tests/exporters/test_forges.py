"""Comments of GitHub and GitLab: read in pages, written once, within limits, with errors that say what to do."""

from datetime import UTC, datetime
from email.utils import formatdate

import httpx
import pytest

from replanning import Environment
from replanning.errors import SettingsError
from replanning.exporters._forge import (
    AUTHORSHIP_MARKER,
    CommentIndex,
    Forge,
    ForgeError,
    Marker,
)
from replanning.exporters.github import GitHubIssue
from replanning.exporters.gitlab import GitLabIssue
from replanning.testing import VirtualClock
from tests.support.forges import FULL, TOKEN, US, FakeGitHub, FakeGitLab, Fault, on, served

github = pytest.mark.parametrize("fake", [FakeGitHub], indirect=True)
gitlab = pytest.mark.parametrize("fake", [FakeGitLab], indirect=True)
both = pytest.mark.parametrize("kind", [FakeGitHub, FakeGitLab])


async def test_comments_are_created_and_edited(fake, forge):
    """A comment that is posted is there once, without a token, is edited in place, and known as our own when it is read."""
    fake.says("ada", "hello\r\nthere")
    first = await forge.post(f"## News\n\nof {TOKEN}")
    assert fake.texts()[1] == f"## News\n\nof [redacted]{AUTHORSHIP_MARKER}"
    await forge.edit(first, "## News\n\nof tomorrow")
    theirs, ours = await forge.comments()
    assert (theirs.author, theirs.body, theirs.own, theirs.notice) == (
        "ada",
        "hello\nthere",
        False,
        False,
    )
    assert (ours.id, ours.author, ours.body) == (first, US, "## News\n\nof tomorrow")
    assert (ours.own, ours.notice, ours.bot) == (True, True, False)
    assert ours.at.tzinfo is UTC
    assert len(fake.comments) == 2
    assert isinstance(forge, Forge)


@both
async def test_over_real_http(kind):
    """Over real connections, also cut ones, comments are read, written once and edited."""
    fake = kind()
    environment = Environment(chance=lambda: 0.0)  # waits are short
    with served(fake) as url:
        forge = on(fake, base_url=url, transport=None, environment=environment)
        fake.says("ada", "hello")
        fake.faults = [
            Fault("GET", 429, {"retry-after": "0.01"}),
            Fault("GET", 0),
        ]
        posted = await forge.post("one")
        await forge.aclose()
        await forge.edit(posted, "two")
        assert [comment.body for comment in await forge.comments()] == ["hello", "two"]
        assert (await forge.issue()).title == "It crashes"
        await forge.aclose()
    assert (fake.count("POST"), len(fake.comments)) == (1, 2)


async def test_many_comments(fake, forge):
    """All pages are read in order; pages that have not changed cost nothing, and a page more is found."""
    for number in range(2 * FULL):
        fake.says("ada", f"{number}")
    assert [comment.body for comment in await forge.comments()] == [f"{n}" for n in range(2 * FULL)]
    before = fake.count("GET", 200)
    assert len(await forge.comments()) == 2 * FULL
    fake.says("ada", "more")
    assert [comment.body for comment in await forge.comments()][-1] == "more"
    assert (
        fake.count("GET", 200) <= before + 2
    )  # the page that has begun, once empty, once with one comment
    assert fake.count("GET", 304) == 4


@pytest.mark.parametrize(
    ("status", "headers", "waited"),
    [
        (500, {}, 0.5),
        (502, {}, 0.5),
        (429, {"retry-after": "9"}, 9),
        (503, {"retry-after": "{date}"}, 9),
        (429, {"ratelimit-remaining": "0", "ratelimit-reset": "{seconds}"}, 9),
    ],
)
async def test_what_may_pass_is_tried_again(fake, clock, status, headers, waited):
    """A failure that may pass does not show; a wait that the forge asks for, in seconds or as a moment, is kept."""
    end = clock.now() + 9
    named = {"date": formatdate(end, usegmt=True), "seconds": str(int(end))}
    given = {name: value.format(**named) for name, value in headers.items()}
    fake.faults = [
        Fault("GET", status, given, path="comments"),
        Fault("GET", status, given, path="notes"),
    ]
    fake.says("ada", "hello")
    assert len(await on(fake, clock).comments()) == 1
    assert clock.elapsed == waited


@github
@pytest.mark.parametrize("status", [403, 429])
async def test_the_secondary_limit_of_github(fake, forge, clock, status):
    """A rate limit of GitHub that names no time means a pause of one minute."""
    fake.faults = [Fault("POST", status, message="You have exceeded a secondary rate limit.")]
    with pytest.raises(ForgeError, match="exceeded a secondary rate limit") as caught:
        await forge.post("news")
    assert caught.value.retry_after == 60
    await clock.sleep(60)
    await forge.post("news")
    assert len(fake.comments) == 1


@pytest.mark.parametrize(
    ("status", "arrives"),
    [*((status, True) for status in (0, 500, 502, 504)), (0, False), (500, False)],
)
async def test_a_post_whose_fate_is_unknown(fake, forge, status, arrives):
    """A post that may have arrived is not sent again by itself; who writes notices looks for it before the next try."""
    fake.faults = [Fault("POST", status, done=arrives)]
    index, mark = CommentIndex(forge), Marker("checklist", "r")
    with pytest.raises(ForgeError, match="may have taken effect") as caught:
        await index.write(mark, f"news\n\n{mark}")
    assert not caught.value.final
    assert fake.count("POST") == 1
    assert await index.write(mark, f"news\n\n{mark}") is not arrives
    assert fake.texts() == [f"news\n\n{mark}{AUTHORSHIP_MARKER}"]


async def test_an_edit_is_repeated(fake, forge):
    """An edit whose connection was cut is made again: that does no harm."""
    posted = await forge.post("one")
    fake.faults = [Fault("PATCH", done=True), Fault("PUT")]
    await forge.edit(posted, "two")
    assert fake.texts() == [f"two{AUTHORSHIP_MARKER}"]


async def test_one_deadline(fake, forge, clock):
    """A call ends within its time, retries included, and says when trying again makes sense."""
    forge = on(fake, clock, timeout=20)
    fake.faults = [Fault("GET", 429, {"retry-after": "90"})]
    with pytest.raises(
        ForgeError, match=r"rate limit reached.*in 90 s.*HTTP 429, request F00D"
    ) as caught:
        await forge.comments()
    assert (caught.value.status, caught.value.retry_after, caught.value.final) == (429, 90, False)
    asked = len(fake.asked)
    with pytest.raises(ForgeError, match="rate limit reached"):
        await forge.comments()
    assert (clock.elapsed, len(fake.asked)) == (0, asked)
    await clock.sleep(90)
    assert await forge.comments() == []


@github
async def test_the_limit_of_github(fake, forge, clock):
    """A limit that is used up is waited for, not hammered on, until the moment that GitHub has named."""
    await forge.comments()
    fake.limit = 1
    fake.says("ada", "hello")
    await forge.comments()
    asked = len(fake.asked)
    with pytest.raises(ForgeError) as caught:
        await forge.post("news")
    assert caught.value.retry_after == pytest.approx(3600, abs=1)
    assert len(fake.asked) == asked
    await clock.sleep(3600)
    fake.limit = None
    await forge.post("news")


@pytest.mark.parametrize(
    ("status", "says"), [(401, "not accepted"), (403, "lacks the permission"), (404, "not found")]
)
async def test_what_does_not_pass(fake, forge, clock, status, says):
    """A refusal is an error at once that says why, where to look, and which request it was."""
    fake.faults = [Fault("POST", status, message=f"not with {TOKEN}")]
    with pytest.raises(ForgeError, match=f"{says}.*; check {forge.name.upper()}_TOKEN") as caught:
        await forge.post("news")
    assert clock.elapsed == 0
    error = caught.value
    assert (error.status, error.final, error.request_id) == (status, True, "F00D")
    assert error.excerpt == "not with [redacted]"
    assert TOKEN not in f"{error!r} {error} {forge!r}"


async def test_without_a_token(fake, forge):
    """Public issues are read without a token; writing without one fails before any request and names the variable."""
    fake.says("ada", "hello")
    forge = on(fake, token="")
    assert [comment.body for comment in await forge.comments()] == ["hello"]
    with pytest.raises(
        ForgeError, match=f"writing needs a token: set {forge.name.upper()}_TOKEN"
    ) as caught:
        await forge.post("news")
    assert caught.value.final
    assert fake.count("POST") == 0


@gitlab
async def test_no_commands_to_gitlab(fake, forge):
    """No line of what is written is a command to GitLab, and it is read back as it was written."""
    posted = await forge.post("/close\n  /assign @eve\nbut/or")
    await forge.edit(posted, "/merge")
    assert fake.obeyed == []
    assert fake.texts() == [f"&#47;merge{AUTHORSHIP_MARKER}"]
    assert [one.body for one in await forge.comments()] == ["/merge"]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"[" + b" " * 8_000_000, "larger than 8,000,000 bytes"),
        (b"[" * 100_000, "the response is not JSON"),
        (b"<html>hello</html>", r"not JSON; is https://.* the URL of its API.*<html>hello"),
    ],
)
async def test_strange_answers(fake, answer, says):
    """An answer that is too large, nested beyond reading, or from no API at all is an error that says so."""
    forge = on(
        fake, transport=httpx.MockTransport(lambda request: httpx.Response(200, content=answer))
    )
    with pytest.raises(ForgeError, match=says):
        await forge.comments()


@github
async def test_moved(fake, forge):
    """A project that has moved within the forge is followed there, and nowhere else."""

    def moved(request: httpx.Request) -> httpx.Response:
        if request.url.path.startswith("/repos/octo/repo/"):
            return httpx.Response(301, headers={"location": f"{there}{request.url.path[17:]}"})
        seen.append(request.url.path)
        return httpx.Response(
            200, json=[] if request.url.path.endswith("comments") else {"login": US}
        )

    seen: list[str] = []
    there = "https://api.github.com/repositories/5/"
    forge = on(fake, transport=httpx.MockTransport(moved))
    assert await forge.comments() == []
    assert seen == ["/user", "/repositories/5/issues/12", "/repositories/5/issues/12/comments"]
    for elsewhere in (
        "https://evil.example/",
        "http://api.github.com/",
        "https://evil.example:443/",
    ):
        there = elsewhere
        with pytest.raises(
            ForgeError, match="redirected to another host, where the token is not sent"
        ):
            await forge.comments()
    assert len(seen) == 3


GITHUB_CORP = {"GITHUB_API_URL": "https://git.corp/api/v3/"}
GITLAB_CORP = {"GITLAB_API_URL": "https://git.corp"}
CI = {"CI_API_V4_URL": "https://git.corp/api/v4"}


@pytest.mark.parametrize(
    ("forge", "text", "issue_id", "variables"),
    [
        (GitHubIssue, "octo/repo#12", "octo/repo#12", {}),
        (GitHubIssue, "https://github.com/octo/repo/issues/12", "octo/repo#12", {}),
        (GitHubIssue, "https://github.com/octo/repo/pull/12/files", "octo/repo#12", {}),
        (GitHubIssue, "https://github.com/octo/repo/issues/12#issuecomment-5", "octo/repo#12", {}),
        (GitHubIssue, "https://git.corp/octo/repo/issues/12", "octo/repo#12", GITHUB_CORP),
        (GitLabIssue, "group/project#12", "gitlab:group/project#12", {}),
        (GitLabIssue, "gitlab:group/sub/project#12", "gitlab:group/sub/project#12", {}),
        (GitLabIssue, "group/project!7", "gitlab:group/project!7", {}),
        (
            GitLabIssue,
            "https://gitlab.com/group/sub/project/-/issues/12#note_3",
            "gitlab:group/sub/project#12",
            {},
        ),
        (
            GitLabIssue,
            "https://gitlab.com/group/project/-/merge_requests/7/diffs",
            "gitlab:group/project!7",
            {},
        ),
        (GitLabIssue, "https://git.corp/a/b/-/work_items/4", "gitlab:a/b#4", GITLAB_CORP),
        (GitLabIssue, "https://git.corp/a/b/-/issues/4", "gitlab:a/b#4", CI),
    ],
)
def test_names_of_issues(forge, text, issue_id, variables):
    """An issue, pull or merge request is named in short or by its page, also on a server of one's own."""
    assert forge(text, environ=variables).id == issue_id
    assert forge(issue_id, environ=variables).id == issue_id


ISSUES = [
    "",
    "12",
    "octo#12",
    "octo/repo#0",
    "octo/repo#x",
    "../..#1",
    "https://github.com/octo",
    "a b/c#1",
]
ADDRESSES = [
    "ftp://x",
    "https://",
    "https://me:secret@git.corp",
    "https://git.corp?x=1",
    "http://a:b",
    "http://xn--/",
]
ELSEWHERE = r"evil\.example is not served by .*; set GIT(HUB|LAB)_API_URL"


@pytest.mark.parametrize("forge", [GitHubIssue, GitLabIssue])
@pytest.mark.parametrize(
    ("setting", "values", "message"),
    [
        ("issue", ISSUES, r"expected|such as https://"),
        ("token", ["two words", "tökens", "a\nb"], "characters that are not allowed in tokens"),
        ("base_url", ADDRESSES, "expected something like https://"),
    ],
)
def test_wrong_settings(forge, setting, values, message):
    """What names no issue, and a wrong token or address of an API, is refused with what was expected, and no secret."""
    for value in values:
        with pytest.raises(SettingsError, match=message) as caught:
            forge(**{"issue": "octo/repo#12", "environ": {}, setting: value})
        assert "secret" not in str(caught.value)
        assert setting != "token" or value not in str(caught.value)


@pytest.mark.parametrize("server", ["evil.example", "github.com.evil.example"])
@pytest.mark.parametrize(
    ("forge", "path"),
    [(GitHubIssue, "octo/repo/issues/12"), (GitLabIssue, "group/project/-/issues/12")],
)
def test_tokens_stay_where_they_belong(forge, path, server):
    """An address of another server is refused, with the variable that would make it ours."""
    with pytest.raises(SettingsError, match=ELSEWHERE):
        forge(f"https://{server}/{path}", token=TOKEN, environ={})


async def test_an_issue(fake, forge, clock):
    """Title, text, comments and what is known of the repository become a request; our own notices are no comments."""
    await forge.post("## a notice of an earlier run")
    fake.says("eve", "Also on Tuesdays.")
    request = await forge.issue()
    assert request.goal.objective.startswith("Resolve ")
    assert request.goal.objective.endswith(": It crashes")
    assert (request.issue_id, request.title, request.text) == (
        forge.id,
        "It crashes",
        "Every time that I start it.",
    )
    (comment,) = request.comments
    assert (comment.author, comment.text) == ("eve", "Also on Tuesdays.")
    assert comment.at == datetime.fromtimestamp(int(clock.now()), UTC)
    about = request.repository
    assert (about["forge"], about["default_branch"], about["description"]) == (
        forge.name,
        "main",
        "A tool",
    )
    assert (about["files"], about["labels"], about["author"]) == (
        ["src/", "README.md"],
        ["bug"],
        "eve",
    )
    assert str(about["readme"]).endswith("It does things.")


async def test_a_pull_request_of_github():
    """Of a pull request, reviews, what they say about lines, and the changed files are part of the request."""
    async with VirtualClock() as clock:
        fake = FakeGitHub(clock.now, pull=True)
        fake.says("ada", "first")
        await clock.sleep(1)
        fake.lines("bob", "rename this", "a.py", 3)
        await clock.sleep(1)
        fake.reviewed("bob", "not yet", "CHANGES_REQUESTED")
        fake.reviewed("cy", "", "APPROVED")
        fake.reviewed("cy", "thinking", "PENDING")
        request = await on(fake, clock).issue()
    assert [c.text for c in request.comments] == [
        "first",
        "a.py:3: rename this",
        "Changes requested. not yet",
    ]
    assert request.repository["pull_request"] == {
        "base": "main",
        "head": "fix",
        "changed_files": [{"path": "a.py", "status": "modified", "additions": 2, "deletions": 1}],
    }


@gitlab
async def test_a_merge_request_of_gitlab(fake, forge):
    """Of a merge request, notes about lines and the changed files are part of the request; GitLab's own notes are not."""
    fake.says("ada", "changed the title", system=True)
    fake.says("bob", "rename this", position={"new_path": "a.py", "new_line": 3})
    forge = GitLabIssue("group/project!7", token=TOKEN, environ={}, transport=fake.transport)
    request = await forge.issue()
    assert [comment.text for comment in request.comments] == ["a.py:3: rename this"]
    assert request.repository["merge_request"] == {
        "base": "main",
        "head": "fix",
        "changed_files": [
            {"path": "a.py", "status": "added"},
            {"path": "b.py", "status": "modified"},
        ],
    }


async def test_only_the_issue(fake, forge):
    """Data that a token may not see is left out; an issue that it may not see is an error."""
    paths = ("contents", "readme", "tree", "README.md")
    fake.faults = [Fault("GET", 403, path=path) for path in paths]
    request = await forge.issue()
    assert request.title == "It crashes"
    assert not {"files", "readme"} & set(request.repository)
    fake.faults = [Fault("GET", 404, path="issues")]
    with pytest.raises(ForgeError, match="not found, or the token may not see it") as caught:
        await forge.issue()
    assert caught.value.final


@pytest.mark.parametrize(
    "trusting",
    [
        {"trusted": ["Friend", "mallory"]},
        {
            "environ": {
                f"{forge}_TRUSTED_USERS": "friend, @Mallory" for forge in ("GITHUB", "GITLAB")
            }
        },
    ],
    ids=["argument", "environment"],
)
async def test_who_may_steer(fake, trusting):
    """Members of the project and those who are trusted may steer; strangers, guests and programs may not."""
    forge = on(fake, **trusting)
    may = {"ada", "bob", "friend", "mallory"}
    for author in (*may, "guest", "eve", "dependabot[bot]", "project_12_bot"):
        fake.says(author, "do it otherwise")
    comments = await forge.comments()
    assert len(comments) == 8
    assert {one.author for one in comments if await forge.may_steer(one)} == may


async def test_the_same_account(fake, forge):
    """With whatever account a notice was written, it steers nothing; what people write with it, or quote of it, does."""
    await forge.post("a notice")
    fake.says(US, "do it otherwise")
    fake.says("eve", f"I am a notice{AUTHORSHIP_MARKER}")
    fake.says("ada", f"the plan of another run{AUTHORSHIP_MARKER}")
    fake.says(
        "ada", "> the plan of another run\n>\n> <!-- written by replanning -->\n\nNot like this."
    )
    comments = await forge.comments()
    assert [await forge.may_steer(one) for one in comments] == [False, True, False, False, True]
    _, person, faked, *_ = comments
    assert (person.own, person.notice, faked.notice) == (True, False, False)


@gitlab
async def test_members_that_cannot_be_looked_up(fake, forge):
    """If a token may not look up members, that is an error; the author is not treated as a stranger."""
    fake.says("ada", "do it otherwise")
    fake.faults = [Fault("GET", 403, message="insufficient_scope", path="/members/")]
    (comment,) = await forge.comments()
    with pytest.raises(ForgeError, match="the token lacks the permission; check GITLAB_TOKEN"):
        await forge.may_steer(comment)
    assert await forge.may_steer(comment)
