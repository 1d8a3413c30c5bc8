"""The kind `shell`."""

import json
import os
import shutil
import signal
import sys

import anyio
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from replanning.errors import OutputError, ToolError, TransientError
from replanning.plan import JsonObject
from replanning.run.processes import ProcessTree
from replanning.tools import (
    CommandFailed,
    InvalidArguments,
    InvalidTool,
    ToolExecutor,
    ToolOutputTooLarge,
    ToolUnavailable,
    TransientCommandFailed,
)
from replanning.tools.shell import SANDBOX_PROGRAM
from tests.support.tools import PATIENCE, Attempt, Pulse, call, names_in, shell, spec, task, use

SHOW = f"{sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "
"""A command that prints the words that follow it as JSON."""


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("echo one; echo two >&2", {"exit_code": 0, "stdout": "one", "stderr": "two"}),
        ("cat; echo end", {"stdout": "end"}),  # its input is empty
        ("""printf '{"a": [1, 2]}\\n'""", {"json": {"a": [1, 2]}}),
        ("""echo working; printf '{"a": 1}\\n'""", {"json": {"a": 1}}),
        ("""echo '{"a": NaN}'""", {"stdout": '{"a": NaN}', "stderr": ""}),
        ("printf 'a\\377b'", {"stdout": "a\ufffdb", "stderr": "", "undecodable": ["stdout"]}),
    ],
    ids=["streams", "no input", "json", "json in the last line", "no json", "no text"],
)
async def test_output(command, part):
    """The output has the exit code and both streams as text, JSON as a whole or in the last line, and what is no UTF-8."""
    output = await use(shell(command))
    assert output.items() >= part.items()
    assert ("json" in output, "undecodable" in output) == ("json" in part, "undecodable" in part)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1
    )
)
@example(values=["$(echo x)", "`echo x`", "; echo x", "' echo x '", "\necho x", "&& echo x"])
async def test_values_arrive_as_they_are(values):
    """Whatever text an argument holds, the program receives exactly it, as one word: nothing of it is run."""
    output = await use(shell(SHOW + "{first} {all}"), {"first": values[0], "all": list(values)})
    assert output["json"] == [values[0], *values]


@pytest.mark.parametrize(
    ("words", "arguments", "expected"),
    [
        ("{x}", {"x": "a b"}, ["a b"]),
        ("{x}", {"x": ""}, [""]),
        ("{x} {y} {z}", {"x": True, "y": 3, "z": 2.5}, ["true", "3", "2.5"]),
        ("{x}", {"x": {"a": [1, None]}}, ['{"a":[1,null]}']),
        ("{x}", {"x": ["a", 1, "b c"]}, ["a", "1", "b c"]),
        ("{x}", {"x": []}, []),
        ("--out={x}/{x}.txt", {"x": "a b"}, ["--out=a b/a b.txt"]),
        (
            " ".join(f"{{n{i}}}" for i in range(12)),
            {f"n{i}": i for i in range(12)},
            [str(i) for i in range(12)],
        ),
    ],
)
async def test_values_as_words(words, arguments, expected):
    """Numbers, booleans and objects are one word each or a part of one, a list is a word per item, in their order."""
    assert (await use(shell(SHOW + words), arguments))["json"] == expected


async def test_shell_features():
    """Pipes, variables of the shell, functions and braces of other languages work as in any script."""
    command = """say() { set -- other; printf '%s\\n' {x} "$HOME" | awk '{print NR, $1}'; }
        say; echo ${HOME} {{x}} {} '{{x}}' $#"""
    output = await use(
        shell(command), {"x": "value"}, environ={"PATH": os.environ["PATH"], "HOME": "/home/me"}
    )
    assert str(output["stdout"]).splitlines() == ["1 value", "2 /home/me", "/home/me {x} {} {x} 0"]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "echo '{x}'",
            "'t' cannot be run: {x} is inside quotes; values are quoted for you, remove the quotes, or write {{x}}",
        ),
        ('echo "hello {x}"', "{x} is inside quotes"),
        ("echo `cat {x}`", "write $(…) instead"),
        ("echo \\{x}", "follows a backslash"),
        ("echo $(( {x} + 1 ))", "calculate"),
        ("echo ${y:-{x}}", "inside ${…}"),
        ("echo hi # {x}", "in a comment"),
        ("cat <<END\n{x}\nEND", "here-document"),
        ("echo 'it", "opens a ' that is never closed"),
        ("curl -H {env:TOKEN}", 'write "$TOKEN"'),
        ("  ", "its command is empty"),
        ("echo \0", "NUL"),
        ("echo " + "x" * 100_000, "more than 100000 characters"),
    ],
)
async def test_commands_that_are_refused(command, message):
    """A command in which a value could not be one word is refused, with the way out."""
    with pytest.raises(InvalidTool) as caught:
        await use(shell(command), {"x": "1"}, environ={"TOKEN": "t"})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("echo {x} {y}", {"z": 1}, "it needs the arguments ['x', 'y'], the task gives ['z']"),
        ("echo {x}", {"x": None}, "'x' is null"),
        ("echo {x}", {"x": ["a", None]}, "'x[1]' is null"),
        ("echo {x}", {"x": "a\0b"}, "'x' holds the character NUL"),
        ("echo {x}", {"x": "\ud800"}, "lone surrogate"),
        ("echo {x}", {"x": float("nan")}, "not finite"),
        ("echo --all={x}", {"x": ["a"]}, "'x' is a list, but {x} does not stand alone"),
    ],
)
async def test_arguments_that_are_refused(command, arguments, message):
    """Arguments that cannot be words of the command are refused before anything runs."""
    attempt = Attempt()
    tool = shell(command)
    with pytest.raises(InvalidArguments) as caught:
        await ToolExecutor([tool])(task().model_copy(update={"arguments": arguments}), attempt)
    assert message in str(caught.value)
    assert attempt.noted == []


@pytest.mark.parametrize(
    "command",
    [
        "cat {x}",
        "ssh {x}",
        "curl -s {x}",
        "git log -p {x}",
        "cat {y}{x}",
        "cat '' \"\"{x}",
        "cat $EMPTY{x}",
        'cat "$EMPTY"{x}',
        "cat ${EMPTY}{x}",
        "cat \\\n{x}",
        "if true; then cat {x}; fi",
        "cat a 2>&1 {x}",
        "cat -- a; cat {x}",
        "cat $(echo --) {x}",
        "timeout 5 -- cat {x}",
        "printf {x}",
    ],
)
async def test_options_that_are_refused(command):
    """An argument that begins with a dash is refused where a program would read it as an option."""
    with pytest.raises(InvalidArguments, match=r"'x' is '-v', which would be read as an option"):
        await use(shell(command), {"x": "-v", "y": ""})
    with pytest.raises(InvalidArguments, match="-v"):
        await use(shell("cat {x}"), {"x": ["a", "-v"]})


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("printf %s -- {x}", "---v"),
        ("printf '%s' {x}", "-v"),
        ("echo {x}", "-v"),
        ("echo --x={x} -x{x} a{x} 'b'{x} {y}{x}", "--x=-v -x-v a-v b-v a-v"),
        ('cd "$(mktemp -d)" && printf a > {x} && cat < {x}', "a"),
        ("printf %s -v | timeout 5 /bin/grep -e {x}", "-v"),
        ("[ {x} = -v ] && sh -c 'echo $1' _ {x}", "-v"),
        ("A={x}; echo $A", "-v"),
        ("printf '%s' {n}", "-3"),
        ("seq {n} -3", "-3"),
    ],
)
async def test_options_that_are_none(command, shown):
    """An argument may begin with a dash after `--`, as the value of an option, within a word, and where it is a number."""
    tool = spec(
        name="t",
        kind="shell",
        command=command,
        parameters={"x": "string", "y": "string", "n": "integer"},
    )
    assert (await use(tool, {"x": "-v", "y": "a", "n": -3}))["stdout"] == shown


async def test_failed_command():
    """A command that fails says which tool, which command, which exit code and the end of both streams."""
    command = "echo 2 tests failed; echo oh dear >&2; exit 3"
    with pytest.raises(CommandFailed) as caught:
        await use(shell(command))
    error = caught.value
    assert (error.tool, error.exit_code, error.stderr, error.stdout) == (
        "t",
        3,
        "oh dear",
        "2 tests failed",
    )
    said = (
        f"tool 't' ended with exit code 3: oh dear (command: {command}); it printed: 2 tests failed"
    )
    assert str(error) == said


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("false\necho done", "exit code 1"),  # the first failure ends a script
        ("exit 127", r"exit code 127, without any output \(command: exit 127\)$"),
        (
            "echo found 3; exit 1",
            r"exit code 1 \(command: echo found 3; exit 1\); it printed: found 3$",
        ),
        ("kill -KILL $$", r"exit code 137 \(SIGKILL\)"),
        ("if true; then", "(?i)syntax error"),
        (
            "head -c 5000 /dev/zero | tr '\\0' x >&2; echo end >&2; exit 1",
            r"\[… 3803 characters before\] x+end",
        ),
    ],
)
@pytest.mark.parametrize("transient", [False, True])
async def test_failures(command, message, transient):
    """Exit code, signal and end of stderr are in the error, which may pass if the tool declares the exit code so."""
    with pytest.raises(CommandFailed, match=message) as caught:
        await use(shell(command, transient=[1, 2, 127, 137] if transient else []))
    assert (
        isinstance(caught.value, TransientError)
        is isinstance(caught.value, TransientCommandFailed)
        is transient
    )
    assert isinstance(caught.value, ToolError)


async def test_accepted_exit_codes():
    """An exit code that the tool accepts is a result, which the output states; any other is a failure."""
    output = await use(shell("echo none; exit 1", accepted=[1], transient=[1]))
    assert output == {"exit_code": 1, "stdout": "none", "stderr": ""}
    with pytest.raises(CommandFailed):
        await use(shell("exit 2", accepted=[1]))


@pytest.mark.parametrize(
    "command", ["no-such-program --flag", "true && no-such-program", "echo a\nno-such-program"]
)
async def test_missing_program(command):
    """A program that is not there is named, and trying again is not suggested."""
    with pytest.raises(ToolUnavailable) as caught:
        await use(shell(command))
    assert str(caught.value) == (
        "tool 't' needs the program 'no-such-program', which is not on the PATH; install it, or use another tool"
    )
    assert not isinstance(caught.value, TransientError)


@pytest.mark.parametrize("env", [{"A=B": "c"}, {"": "c"}, {"A": "b\0"}, {"A\0": "b"}])
async def test_variables_that_are_refused(env):
    """An environment that no process can have is refused."""
    with pytest.raises(InvalidTool, match=r"cannot be (the name|the value) of a variable"):
        await use(shell("true", env=env))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"command": "true", "cwd": "nowhere"},
            r"the working directory '.*nowhere'; create it, or change `cwd`",
        ),
        ({"command": "echo {x}"}, "cannot be started: Argument list too long"),
        (
            {"command": "true", "env": {"A": "{env:ONE}", "B": "{env:TWO}{env:ONE}"}},
            "the environment variables ONE, TWO; which are not set",
        ),
    ],
)
async def test_unavailable(tmp_path, fields, message):
    """A command that cannot be started says why, and nothing has run."""
    attempt = Attempt()
    with pytest.raises(ToolUnavailable, match=message):
        await use(
            spec(kind="shell", **fields), {"x": "x" * 200_000}, attempt, cwd=tmp_path, environ={}
        )
    assert attempt.noted == []


async def test_working_directory(tmp_path):
    """Commands run in the directory of the tool, relative to that of the executor."""
    (tmp_path / "sub").mkdir()
    output = await use(shell("pwd -P", cwd="sub"), cwd=tmp_path)
    assert output["stdout"] == str((tmp_path / "sub").resolve())


async def test_environment_of_a_command():
    """A command gets what its tool declares, what every command needs, its idempotency key and mark; no key of a model."""
    tool = shell("env", env={"B": "<{env:ONE}>"})
    environ = {
        "PATH": os.environ["PATH"],
        "ONE": "1",
        "OPENAI_API_KEY": "k",
        "LC_ALL": "C",
        "HOME": "/home/me",
    }
    output = await use(tool, attempt=Attempt(idempotency_key="k-7"), environ=environ)
    told = dict(line.split("=", 1) for line in str(output["stdout"]).splitlines())
    assert told.keys() - {"PWD", "OLDPWD", "SHLVL", "_"} == {
        "PATH",
        "LC_ALL",
        "HOME",
        "B",
        "REPLANNING_IDEMPOTENCY_KEY",
        "REPLANNING_PROCESS_MARKS",
    }
    assert (told["B"], told["HOME"], told["REPLANNING_IDEMPOTENCY_KEY"]) == (
        "<1>",
        "/home/me",
        "k-7",
    )


async def test_secrets_are_hidden_in_errors():
    """The output has the value of a variable that a tool refers to; an error of the tool has not."""
    command = 'echo "it is $T"; printf \'{"t": "%s"}\' "$T"'
    environ = {"PATH": os.environ["PATH"], "TOKEN": "s3cr3t"}
    output = await use(shell(command, env={"T": "{env:TOKEN}"}), environ=environ)
    assert (output["stdout"], output["json"]) == (
        'it is s3cr3t\n{"t": "s3cr3t"}',
        {"t": "s3cr3t"},
    )
    with pytest.raises(CommandFailed) as caught:
        await use(
            shell('echo "bad token $T" >&2; exit 1', env={"T": "{env:TOKEN}"}), environ=environ
        )
    assert caught.value.stderr == "bad token [redacted]"
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(("depth", "read"), [(100, True), (101, False), (100_000, False)])
async def test_deep_json_output(depth, read):
    """JSON of more than a hundred levels stays the text that it is."""
    output = await use(
        shell(f"printf '%{depth}s' '' | tr ' ' '['; printf '%{depth}s' '' | tr ' ' ']'")
    )
    assert ("json" in output, len(str(output["stdout"]))) == (read, 2 * depth)


@pytest.mark.parametrize(
    ("command", "arguments", "produced"),
    [
        ("touch {out}/new-2.whl; echo built", {"out": "dist"}, {"wheel": "dist/new-2.whl"}),
        ("mkdir {out}; touch {out}/a.whl", {"out": "made"}, {"wheel": "made/a.whl"}),
        ("echo new > {out}/old-1.whl", {"out": "dist"}, {"wheel": "dist/old-1.whl"}),
        (
            "touch {out}/a.txt {out}/b.csv {out}/log",
            {"out": "."},
            {"log": "log", "csv": "b.csv", "other": None},
        ),
        ("cp {src} {dst}", {"src": "in.txt", "dst": "out.txt"}, {"copy": "out.txt"}),
        (
            "touch {out}/{name}.pdf {out}/{name}.log",
            {"out": ".", "name": "report"},
            {"{name}.pdf": "report.pdf"},
        ),
        (
            "touch {out}/a.whl {out}/b.whl {out}/c.wheel {out}/d.wheel",
            {"out": "."},
            {"wheel": None},
        ),
        ("true {out}", {"out": "nowhere"}, {"wheel": None}),
        (
            """touch {out}/x; printf '{"said": "here"}'""",
            {"out": ".", "said": "there", "told": "place"},
            {"said": "here", "told": "place"},
        ),
    ],
    ids=[
        "new file in the directory",
        "in a new directory",
        "rewritten file",
        "by name and ending",
        "named by an argument",
        "named like an argument",
        "several could be it",
        "none could be it",
        "stated by the tool, then by an argument",
    ],
)
async def test_artifacts(tmp_path, command, arguments, produced):
    """A tool produces what it states, else what an argument names, else the only file that is new and fits."""
    (tmp_path / "dist").mkdir()
    for old in ("dist/old-1.whl", "in.txt"):
        (tmp_path / old).write_text("old")
    output = await use(shell(command, produces=list(produced)), arguments, cwd=tmp_path)
    names = {name: name.replace("{name}", "report") for name in produced}
    assert {name: output.get(names[name]) for name in produced} == produced


async def test_output_is_never_cut():
    """Output up to the limit is kept whole; a byte more on either stream is an error that says what to do."""
    output = await use(
        shell("head -c 999 /dev/zero | tr '\\0' x; printf e >&2"), output_limit=1_000
    )
    assert (output["stdout"], output["stderr"]) == ("x" * 999, "e")
    for endless in ("head -c 1000 /dev/zero | tr '\\0' x; printf e >&2", "yes"):
        with pytest.raises(ToolOutputTooLarge) as caught:
            await use(shell(endless), output_limit=1_000)
        assert str(caught.value) == (
            "tool 't' was stopped because its output exceeded 1000 bytes; "
            "let it write to a file and return its name, or raise the output limit (`max_output` in the settings)"
        )
        assert isinstance(caught.value, OutputError)


HOLD = 'exec 3> "$0"; echo up >&3; '
"""A script that shows by the pipe `$0` that it lives."""


@pytest.mark.parametrize("manners", ["", 'trap "" TERM; '], ids=["heeds the request", "ignores it"])
async def test_cancelling_ends_the_whole_tree(tmp_path, manners):
    """When a task is cancelled, all processes of its command are gone, also those that resist."""
    tool = shell(
        f"sh -c '{manners}{HOLD}sleep 1000 & wait; sleep 1000' {{pulse}} & wait; sleep 1000"
    )
    with Pulse(tmp_path) as pulse:
        async with anyio.create_task_group() as group:
            executor = ToolExecutor([tool], grace=0.2)
            group.start_soon(executor, task({"pulse": str(pulse.path)}), Attempt())
            assert await pulse.beat() == b"up\n"
            group.cancel_scope.cancel()
        assert await pulse.beat() == b""


POLITE = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with open(sys.argv[1], "w", buffering=1) as pulse:
    print("up", file=pulse)
    signal.sigwait([signal.SIGTERM])
    print("bye", file=pulse)
"""
"""A program that takes its leave when it is asked to end."""


async def test_cancelled_command_may_clear_up(tmp_path):
    """A cancelled command is asked to end first, and has a moment to clear up."""
    tool = shell(f"{sys.executable} -c '{POLITE}' {{pulse}}; true")
    with Pulse(tmp_path) as pulse:
        async with anyio.create_task_group() as group:
            group.start_soon(
                ToolExecutor([tool], grace=PATIENCE), task({"pulse": str(pulse.path)}), Attempt()
            )
            assert await pulse.beat() == b"up\n"
            group.cancel_scope.cancel()
        assert (await pulse.beat(), await pulse.beat()) == (b"bye\n", b"")


async def test_nothing_is_left_in_the_background(tmp_path):
    """What a command leaves running when it ends is ended with it."""
    with Pulse(tmp_path) as pulse:
        tool = shell(
            f"mkfifo go; sh -c '{HOLD}echo > go; sleep 1000' {{pulse}} & read -r line < go; echo started"
        )
        output = await use(tool, {"pulse": str(pulse.path)}, cwd=tmp_path)
        assert output["stdout"] == "started"
        assert (await pulse.beat(), await pulse.beat()) == (b"up\n", b"")


async def test_process_that_left_the_group(tmp_path):
    """A service that a command starts in a session of its own is not waited for."""
    with Pulse(tmp_path) as pulse:
        inner = f"{HOLD}echo $$ > pid; echo > go; exec sleep 1000"
        tool = shell(
            f"mkfifo go; setsid sh -c '{inner}' {{pulse}} & read -r line < go; echo started"
        )
        output = await use(tool, {"pulse": str(pulse.path)}, cwd=tmp_path, grace=0.1)
        assert output["stdout"] == "started"
        assert await pulse.beat() == b"up\n"
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        assert await pulse.beat() == b""


LEAVING = {
    "session": "setsid sh -c '{inner}' {{pulse}} & wait",
    "double fork": "(setsid sh -c '{inner}' {{pulse}} &) & exec sleep 1000",
    "empty environment": "setsid env -i PATH=\"$PATH\" sh -c '{inner}' {{pulse}} & wait",
}
"""Ways in which a process leaves the group of its command."""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
@pytest.mark.parametrize("way", LEAVING.values(), ids=LEAVING)
async def test_cut_off_with_what_left_the_group(tmp_path, way):
    """What a command has started in a session of its own is ended when the command is cut off, also if it resists."""
    inner = f'trap "" TERM; {HOLD}sleep 1000'
    tool = shell(way.format(inner=inner))
    with Pulse(tmp_path) as pulse:
        async with anyio.create_task_group() as group:
            executor = ToolExecutor([tool], grace=0.1)
            group.start_soon(executor, task({"pulse": str(pulse.path)}), Attempt())
            assert await pulse.beat() == b"up\n"
            group.cancel_scope.cancel()
        assert await pulse.beat() == b""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
async def test_service_may_clear_up(tmp_path):
    """A service that a command has started in a session of its own is asked to end first, once."""
    tool = shell(
        f"setsid {sys.executable} -c '{POLITE}' {{pulse}} </dev/null >/dev/null 2>&1 & wait"
    )
    with Pulse(tmp_path) as pulse:
        async with anyio.create_task_group() as group:
            executor = ToolExecutor([tool], grace=PATIENCE)
            group.start_soon(executor, task({"pulse": str(pulse.path)}), Attempt())
            assert await pulse.beat() == b"up\n"
            group.cancel_scope.cancel()
        assert (await pulse.beat(), await pulse.beat()) == (b"bye\n", b"")


async def test_group_is_noted_before_it_works(tmp_path):
    """A command whose process group cannot be recorded never runs."""

    def refuse(pid: int) -> None:
        raise RuntimeError("the journal is full")

    with pytest.raises(RuntimeError, match="the journal is full"):
        await use(shell("touch ran"), attempt=Attempt(on_note=refuse), cwd=tmp_path)
    assert names_in(tmp_path) == []


async def test_noted_group_is_that_of_the_command():
    """The number that is noted is the process group of everything the command starts."""
    attempt = Attempt()
    output = await use(shell("sh -c 'ps -o pgid= -p $$'"), attempt=attempt)
    assert [int(str(output["stdout"]))] == attempt.noted


async def test_output_can_be_stored():
    """Whatever a command prints, its output is JSON that can be written as UTF-8."""
    output = await use(shell('head -c 4000 /dev/urandom; printf \'\\n{"a": "\\\\ud800"}\''))
    json.dumps(output, ensure_ascii=False).encode()


# Confined to a workspace


@pytest.mark.parametrize("kind", ["shell", "python"])
@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ("in.txt", False),
        (["sub/../in.txt", "new/file"], False),
        ("../out.txt", True),
        ("/etc/passwd", True),
        (["in.txt", "link/x"], True),
        ("~/x", True),
        ("a\0b", True),
    ],
    ids=str,
)
async def test_paths_stay_in_the_workspace(tmp_path, kind, given, refused):
    """An argument of type `path` that leads out of the workspace, also through a link, is refused by every kind of tool."""
    (tmp_path / "ws" / "sub").mkdir(parents=True)
    (tmp_path / "ws" / "link").symlink_to(tmp_path)
    how = {"command": "echo {file}"} if kind == "shell" else {"callable": "json:dumps"}
    tool = spec(
        kind=kind, workspace="ws", parameters={"file" if kind == "shell" else "obj": "path"}, **how
    )
    arguments: JsonObject = {"file" if kind == "shell" else "obj": given}
    if not refused:
        await call(tool, arguments, cwd=tmp_path)
        return
    with pytest.raises(InvalidArguments, match=f"which is outside its workspace '{tmp_path}/ws'"):
        await call(tool, arguments, cwd=tmp_path)


async def test_commands_and_checks_work_in_the_workspace(tmp_path):
    """A command runs in its workspace, as does one that must succeed after it; a directory outside of it is refused."""
    (tmp_path / "ws").mkdir()
    tool = shell("pwd", workspace="ws")
    assert (await use(tool, cwd=tmp_path))["stdout"] == str(tmp_path / "ws")
    checked = Attempt()
    command = "test $(basename $PWD) = ws"
    executor = ToolExecutor([tool], cwd=tmp_path, commands=[command])
    await executor(task(expect={"commands": [command]}), checked)
    assert checked.checked
    with pytest.raises(
        InvalidArguments,
        match="'cwd' is '.', which is outside its workspace".replace("'.'", ".*"),
    ):
        await use(shell("pwd", workspace="ws", cwd="."), cwd=tmp_path)


@pytest.mark.parametrize("works", [True, False])
async def test_commands_run_in_a_sandbox(tmp_path, works, caplog):
    """With bubblewrap a command may write in its workspace alone; where that does not work, it runs with a warning."""
    (tmp_path / "ws").mkdir()
    program = tmp_path / "bin" / "bwrap"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\necho "$@" >> $(dirname "$0")/log\n'
        + (
            'while test $1 != --; do shift; done; shift; exec "$@"'
            if works
            else "echo no namespaces >&2; exit 1"
        )
    )
    program.chmod(0o755)
    environ = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    for _ in range(2):
        assert (await use(shell("echo done", workspace="ws"), cwd=tmp_path, environ=environ))[
            "stdout"
        ] == "done"
    tried, *used = (program.parent / "log").read_text().splitlines()
    assert tried.endswith("-- /bin/sh -c :")
    assert len(used) == 2 * works
    warning = f"{program} does not work here, so commands are not confined to their workspace: no namespaces"
    assert caplog.messages == ([] if works else [warning])
    ws = tmp_path / "ws"
    confined = f"--ro-bind / / --dev /dev --unshare-pid --proc /proc --tmpfs /tmp --bind {ws} {ws} --chdir {ws} -- /bin/sh"
    assert all(words.startswith(confined) for words in used)


@pytest.mark.skipif(shutil.which(SANDBOX_PROGRAM) is None, reason="bubblewrap is not installed")
async def test_a_real_sandbox(tmp_path):
    """Bubblewrap lets a command write in its workspace and in /tmp, and nowhere else, and its exit code through."""
    (tmp_path / "ws").mkdir()
    command = "touch in.txt ../out.txt /tmp/x; touch /var/x 2>/dev/null || exit 7"
    output = await use(shell(command, workspace="ws", accepted=[7]), cwd=tmp_path)
    assert output["exit_code"] == 7
    assert (names_in(tmp_path), names_in(tmp_path / "ws")) == (["ws"], ["in.txt"])


def test_a_mark_that_every_process_has():
    """Processes are never looked for by an empty mark, which all have."""
    with pytest.raises(ValueError, match="every process of the machine"):
        ProcessTree("")
