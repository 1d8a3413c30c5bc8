"""The kind `shell`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import JsonValue

from replanning.errors import OutputError, ToolError, TransientError
from replanning.tools import (
    CommandFailed,
    InvalidArguments,
    InvalidTool,
    ToolExecutor,
    ToolOutputTooLarge,
    ToolUnavailable,
    TransientCommandFailed,
)
from tests.support.tools import PATIENCE, Attempt, Pulse, names_in, shell, task, use

SHOW = f"{sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "
"""A command that prints the words that follow it as JSON."""


async def test_output_of_a_command():
    """A command's output has its exit code and both streams as text, without the line end."""
    output = await use(shell("echo one; echo two >&2"))
    assert output == {"exit_code": 0, "stdout": "one", "stderr": "two"}


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), min_size=1))
async def test_values_arrive_as_they_are(values: list[str]):
    """Whatever text an argument holds, the program receives exactly it, as one word."""
    output = await use(shell(SHOW + "{first} {all}"), {"first": values[0], "all": list(values)})
    assert output["json"] == [values[0], *values]


@pytest.mark.parametrize(
    "value",
    ["$(touch hacked)", "`touch hacked`", "; touch hacked", "' touch hacked '", "\ntouch hacked", "&& touch hacked"],
)
async def test_values_are_never_shell_text(tmp_path: Path, value: str):
    """A value that looks like a command is printed, and not run."""
    output = await use(shell("printf %s {x}"), {"x": value}, cwd=tmp_path)
    assert (output["stdout"], names_in(tmp_path)) == (value, [])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("a b", ["a b"]),
        ("", [""]),
        (True, ["true"]),
        (3, ["3"]),
        (2.5, ["2.5"]),
        ({"a": [1, None]}, ['{"a":[1,null]}']),
        (["a", 1, "b c"], ["a", "1", "b c"]),
        ([], []),
    ],
)
async def test_values_as_words(value: JsonValue, words: list[str]):
    """Numbers, booleans and objects are one word each, a list is a word per item."""
    output = await use(shell(SHOW + "{x}"), {"x": value})
    assert output["json"] == words


async def test_value_within_a_word():
    """A value may be a part of a word, more than once."""
    output = await use(shell(SHOW + "--out={x}/{x}.txt"), {"x": "a b"})
    assert output["json"] == ["--out=a b/a b.txt"]


async def test_more_than_nine_values():
    """Many arguments keep their order and their places."""
    names = [f"n{i}" for i in range(12)]
    output = await use(shell(SHOW + " ".join(f"{{{n}}}" for n in names)), {n: n.upper() for n in names})
    assert output["json"] == [n.upper() for n in names]


async def test_shell_features():
    """Pipes, variables of the shell, functions and braces of other languages work as in any script."""
    command = """say() { set -- other; printf '%s\\n' {x} "$HOME" | awk '{print NR, $1}'; }
        say; echo ${HOME} {{x}} {} '{{x}}' $#"""
    output = await use(shell(command), {"x": "value"}, environ={"PATH": os.environ["PATH"], "HOME": "/home/me"})
    assert str(output["stdout"]).splitlines() == ["1 value", "2 /home/me", "/home/me {x} {} {x} 0"]


async def test_first_failure_ends_the_script():
    """A command of several lines stops at the first that fails, so that its failure is not lost."""
    with pytest.raises(CommandFailed) as caught:
        await use(shell("false\necho done"))
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "echo '{x}'",
            "'t' cannot be run: {x} stands inside quotes; values are quoted for you, remove the quotes, or write {{x}}",
        ),
        ('echo "hello {x}"', "{x} stands inside quotes"),
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
    ],
)
async def test_commands_that_are_refused(command: str, message: str):
    """A command in which a value could not be one word is refused, with the way out."""
    with pytest.raises(InvalidTool) as caught:
        await use(shell(command), {"x": "1"}, environ={"TOKEN": "t"})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("echo {x} {y}", {"z": 1}, "it needs the arguments ['x', 'y'], given are ['z']"),
        ("echo {x}", {"x": None}, "'x' is null"),
        ("echo {x}", {"x": ["a", None]}, "'x[1]' is null"),
        ("echo {x}", {"x": "a\0b"}, "'x' holds the character NUL"),
        ("echo {x}", {"x": "\ud800"}, "lone surrogate"),
        ("echo {x}", {"x": float("nan")}, "not finite"),
        ("echo --all={x}", {"x": ["a"]}, "'x' is a list, but {x} does not stand alone"),
    ],
)
async def test_arguments_that_are_refused(command: str, arguments: dict[str, object], message: str):
    """Arguments that cannot be words of the command are refused before anything runs."""
    attempt = Attempt()
    tool = shell(command)
    with pytest.raises(InvalidArguments) as caught:
        await ToolExecutor([tool])(task().model_copy(update={"arguments": arguments}), attempt)
    assert message in str(caught.value)
    assert attempt.noted == []


async def test_failed_command():
    """A command that fails says which tool, which command, which exit code and the end of stderr."""
    with pytest.raises(CommandFailed) as caught:
        await use(shell("echo {x}; echo oh dear >&2; exit 3"), {"x": "secret value"})
    error = caught.value
    assert (error.tool, error.exit_code, error.stderr) == ("t", 3, "oh dear")
    assert str(error) == "tool 't' ended with exit code 3: oh dear (command: echo {x}; echo oh dear >&2; exit 3)"
    assert not isinstance(error, TransientError)


async def test_declared_exit_code_is_transient():
    """An exit code that the tool lists under `transient` is an error that may pass."""
    with pytest.raises(TransientCommandFailed) as caught:
        await use(shell("exit 75", transient=[75]))
    assert isinstance(caught.value, TransientError)
    assert isinstance(caught.value, ToolError)


async def test_command_ended_by_a_signal():
    """A command that a signal ended has the exit code that shells give it, and the signal's name."""
    with pytest.raises(CommandFailed, match=r"exit code 137 \(SIGKILL\)"):
        await use(shell("kill -KILL $$"))


async def test_long_stderr_is_marked_where_it_was_cut():
    """The error quotes the end of a long stderr and says how much is missing."""
    with pytest.raises(CommandFailed) as caught:
        await use(shell("head -c 5000 /dev/zero | tr '\\0' x >&2; echo end >&2; exit 1"))
    assert caught.value.stderr.startswith("[… 3003 characters before] xxx")
    assert caught.value.stderr.endswith("xend")


@pytest.mark.parametrize("command", ["no-such-program --flag", "true && no-such-program", "echo a\nno-such-program"])
async def test_missing_program(command: str):
    """A program that is not there is named, and trying again is not suggested."""
    with pytest.raises(ToolUnavailable) as caught:
        await use(shell(command))
    assert str(caught.value) == (
        "tool 't' needs the program 'no-such-program', which is not on the PATH; install it, or use another tool"
    )
    assert not isinstance(caught.value, TransientError)


async def test_exit_code_127_of_a_program():
    """A program that itself ends with 127 failed like any other."""
    with pytest.raises(CommandFailed, match="exit code 127"):
        await use(shell("exit 127"))


async def test_script_that_cannot_be_parsed():
    """A mistake in the script is reported in the words of the shell."""
    with pytest.raises(CommandFailed, match=r"(?i)syntax error"):
        await use(shell("if true; then"))


@pytest.mark.parametrize("env", [{"A=B": "c"}, {"": "c"}, {"A": "b\0"}, {"A\0": "b"}])
async def test_variables_that_are_refused(env: dict[str, str]):
    """An environment that no process can have is refused."""
    with pytest.raises(InvalidTool, match=r"cannot be (the name|the value) of a variable"):
        await use(shell("true", env=env))


async def test_missing_working_directory(tmp_path: Path):
    """A working directory that does not exist is named."""
    with pytest.raises(ToolUnavailable, match=r"the working directory '.*nowhere'; create it, or change `cwd`"):
        await use(shell("true", cwd="nowhere"), cwd=tmp_path)


async def test_too_many_words():
    """Words that the system does not take are an error that says so."""
    with pytest.raises(ToolUnavailable, match="cannot be started: Argument list too long"):
        await use(shell("echo {x}"), {"x": "x" * 200_000})


async def test_working_directory(tmp_path: Path):
    """Commands run in the directory of the tool, relative to that of the executor."""
    (tmp_path / "sub").mkdir()
    output = await use(shell("pwd -P", cwd="sub"), cwd=tmp_path)
    assert output["stdout"] == str((tmp_path / "sub").resolve())


async def test_environment_of_a_command():
    """A command inherits the environment, gets that of its tool, and learns its idempotency key."""
    tool = shell("echo $A $B $REPLANNING_IDEMPOTENCY_KEY", env={"B": "<{env:A}>"})
    output = await use(tool, attempt=Attempt(idempotency_key="k-7"), environ={"PATH": os.environ["PATH"], "A": "one"})
    assert output["stdout"] == "one <one> k-7"


async def test_secrets_are_hidden():
    """The value of a variable that a tool refers to appears in no output."""
    tool = shell('echo "it is $T"; printf \'{"t": "%s"}\' "$T"', env={"T": "{env:TOKEN}"})
    output = await use(tool, environ={"PATH": os.environ["PATH"], "TOKEN": "s3cr3t"})
    assert output == {
        "exit_code": 0,
        "stdout": 'it is [redacted]\n{"t": "[redacted]"}',
        "stderr": "",
        "json": {"t": "[redacted]"},
    }


async def test_secrets_are_hidden_in_errors():
    """The value of a variable that a tool refers to appears in no error."""
    tool = shell('echo "bad token $T" >&2; exit 1', env={"T": "{env:TOKEN}"})
    with pytest.raises(CommandFailed) as caught:
        await use(tool, environ={"PATH": os.environ["PATH"], "TOKEN": "s3cr3t"})
    assert caught.value.stderr == "bad token [redacted]"
    assert "s3cr3t" not in str(caught.value)


async def test_unset_variable():
    """A tool that refers to variables that are not set says which, before it runs."""
    attempt = Attempt()
    with pytest.raises(ToolUnavailable, match=r"the environment variables ONE, TWO; which are not set"):
        await use(shell("true", env={"A": "{env:ONE}", "B": "{env:TWO}{env:ONE}"}), attempt=attempt, environ={})
    assert attempt.noted == []


async def test_input_is_empty():
    """A command that reads its input finds it empty instead of waiting for ever."""
    assert (await use(shell("cat; echo end")))["stdout"] == "end"


async def test_json_output():
    """What is printed as JSON can be referred to, as a whole or as the last line."""
    whole = await use(shell("""printf '{"a": [1, 2]}\\n'"""))
    last = await use(shell("""echo working; printf '{"a": 1}\\n'"""))
    none = await use(shell("""echo '{"a": NaN}'"""))
    assert (whole["json"], last["json"], "json" in none) == ({"a": [1, 2]}, {"a": 1}, False)


@pytest.mark.parametrize(("depth", "read"), [(100, True), (101, False), (100_000, False)])
async def test_deep_json_output(depth: int, read: bool):
    """JSON of more than a hundred levels stays the text that it is."""
    output = await use(shell(f"printf '%{depth}s' '' | tr ' ' '['; printf '%{depth}s' '' | tr ' ' ']'"))
    assert ("json" in output, len(str(output["stdout"]))) == (read, 2 * depth)


async def test_bytes_that_are_no_text():
    """Bytes that are not UTF-8 are replaced, and the output says in which stream."""
    output = await use(shell("printf 'a\\377b'"))
    assert output == {"exit_code": 0, "stdout": "a\ufffdb", "stderr": "", "undecodable": ["stdout"]}


async def test_built_file_is_the_artifact(tmp_path: Path):
    """The one new file in the directory that a tool was given is what it produces."""
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "old-1.whl").touch()
    output = await use(shell("touch {out}/new-2.whl; echo built", produces=["wheel"]), {"out": "dist"}, cwd=tmp_path)
    assert output["wheel"] == "dist/new-2.whl"


async def test_built_file_in_a_new_directory(tmp_path: Path):
    """The directory that a tool was given may be made by the tool."""
    output = await use(shell("mkdir {out}; touch {out}/a.whl", produces=["wheel"]), {"out": "dist"}, cwd=tmp_path)
    assert output["wheel"] == "dist/a.whl"


async def test_rebuilt_file_is_the_artifact(tmp_path: Path):
    """A file that is written again, as on a retry, is what was produced."""
    (tmp_path / "a.whl").write_text("old")
    output = await use(shell("echo new > {out}/a.whl", produces=["wheel"]), {"out": "."}, cwd=tmp_path)
    assert output["wheel"] == "a.whl"


async def test_artifacts_by_name_and_ending(tmp_path: Path):
    """Of several new files, each artifact is the one with its name or its ending."""
    tool = shell("touch {out}/a.txt {out}/b.csv {out}/log", produces=["log", "csv", "other"])
    output = await use(tool, {"out": "."}, cwd=tmp_path)
    assert {key: output.get(key) for key in ("log", "csv", "other")} == {"log": "log", "csv": "b.csv", "other": None}


async def test_artifact_that_an_argument_names(tmp_path: Path):
    """A file that was written where an argument says is what was produced; the one that was read is not."""
    (tmp_path / "in.txt").write_text("text")
    output = await use(shell("cp {src} {dst}", produces=["copy"]), {"src": "in.txt", "dst": "out.txt"}, cwd=tmp_path)
    assert output["copy"] == "out.txt"


async def test_artifact_with_the_name_of_an_argument_in_it(tmp_path: Path):
    """What a tool produces may be named by its arguments."""
    tool = shell("touch {out}/{name}.pdf {out}/{name}.log", produces=["{name}.pdf"])
    output = await use(tool, {"out": ".", "name": "report"}, cwd=tmp_path)
    assert output["report.pdf"] == "report.pdf"


async def test_artifact_that_is_not_clear(tmp_path: Path):
    """Where several files could be the artifact, or none, none is named."""
    tool = shell("touch {out}/a.whl {out}/b.whl {out}/c.wheel {out}/d.wheel", produces=["wheel"])
    assert "wheel" not in await use(tool, {"out": "."}, cwd=tmp_path)
    assert "wheel" not in await use(shell("true {out}", produces=["wheel"]), {"out": "nowhere"}, cwd=tmp_path)


@pytest.mark.deep
async def test_directory_of_many_files(tmp_path: Path):
    """A directory of more than ten thousand files is not searched."""
    tool = shell("seq 1 10001 | xargs touch; touch new.whl; true {out}", produces=["whl"])
    assert "whl" not in await use(tool, {"out": "."}, cwd=tmp_path)


async def test_artifact_that_the_tool_names(tmp_path: Path):
    """What a tool says itself goes before where it was told to put it, and that before what is found."""
    command = """touch {out}/x; printf '{"said": "here"}'"""
    tool = shell(command, produces=["said", "told"])
    output = await use(tool, {"out": ".", "said": "there", "told": "place"}, cwd=tmp_path)
    assert (output["said"], output["told"]) == ("here", "place")


async def test_output_without_end():
    """A tool that prints without end is stopped, and the error says what to do."""
    with pytest.raises(ToolOutputTooLarge) as caught:
        await use(shell("yes"), output_limit=10_000)
    assert str(caught.value) == (
        "tool 't' was stopped because what it printed exceeded 10000 bytes; "
        "let it write to a file and name the file, or raise the output limit (`max_output` in the settings)"
    )
    assert isinstance(caught.value, OutputError)


@pytest.mark.parametrize(("size", "fits"), [(1_000, True), (1_001, False)])
async def test_output_is_never_cut(size: int, fits: bool):
    """Output up to the limit is kept whole, and a byte more on either stream is an error."""
    command = shell(f"head -c {size - 1} /dev/zero | tr '\\0' x; printf e >&2")
    if fits:
        output = await use(command, output_limit=1_000)
        assert len(f"{output['stdout']}{output['stderr']}") == size
    else:
        with pytest.raises(ToolOutputTooLarge):
            await use(command, output_limit=1_000)


HOLD = 'exec 3> "$0"; echo up >&3; '
"""A script that shows by the pipe `$0` that it lives."""


@pytest.mark.parametrize("manners", ["", 'trap "" TERM; '], ids=["heeds the request", "ignores it"])
async def test_cancelling_ends_the_whole_tree(tmp_path: Path, manners: str):
    """When a task is cancelled, all processes of its command are gone, also those that resist."""
    tool = shell(f"sh -c '{manners}{HOLD}sleep 1000 & wait; sleep 1000' {{pulse}} & wait; sleep 1000")
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


async def test_cancelled_command_may_clear_up(tmp_path: Path):
    """A cancelled command is asked to end first, and has a moment to clear up."""
    tool = shell(f"{sys.executable} -c '{POLITE}' {{pulse}}; true")
    with Pulse(tmp_path) as pulse:
        async with anyio.create_task_group() as group:
            group.start_soon(ToolExecutor([tool], grace=PATIENCE), task({"pulse": str(pulse.path)}), Attempt())
            assert await pulse.beat() == b"up\n"
            group.cancel_scope.cancel()
        assert (await pulse.beat(), await pulse.beat()) == (b"bye\n", b"")


async def test_nothing_is_left_in_the_background(tmp_path: Path):
    """What a command leaves running when it ends is ended with it."""
    with Pulse(tmp_path) as pulse:
        tool = shell(f"mkfifo go; sh -c '{HOLD}echo > go; sleep 1000' {{pulse}} & read -r line < go; echo started")
        output = await use(tool, {"pulse": str(pulse.path)}, cwd=tmp_path)
        assert output["stdout"] == "started"
        assert (await pulse.beat(), await pulse.beat()) == (b"up\n", b"")


async def test_process_that_left_the_group(tmp_path: Path):
    """A service that a command starts in a session of its own is not waited for."""
    with Pulse(tmp_path) as pulse:
        inner = f"{HOLD}echo $$ > pid; echo > go; exec sleep 1000"
        tool = shell(f"mkfifo go; setsid sh -c '{inner}' {{pulse}} & read -r line < go; echo started")
        output = await use(tool, {"pulse": str(pulse.path)}, cwd=tmp_path, grace=0.1)
        assert output["stdout"] == "started"
        assert await pulse.beat() == b"up\n"
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        assert await pulse.beat() == b""


async def test_group_is_noted_before_it_works(tmp_path: Path):
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


DIES = """
import os, signal, sys, anyio
from replanning.tools import ToolExecutor
from tests.support.tools import Attempt, shell, task

def die(pid):
    print(pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

executor = ToolExecutor([shell("touch ran")], cwd=sys.argv[1])
anyio.run(executor, task(), Attempt(on_note=die), backend=sys.argv[2])
"""


@pytest.mark.deep
@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux to wait for a process of someone else")
async def test_killed_before_the_note(tmp_path: Path, anyio_backend_name: str):
    """When we are killed before a process group is recorded, its command never runs."""
    dead = await anyio.run_process([sys.executable, "-c", DIES, str(tmp_path), anyio_backend_name], check=False)
    assert dead.returncode == -signal.SIGKILL, dead.stderr.decode()
    try:
        process = os.pidfd_open(int(dead.stdout))
    except ProcessLookupError:
        pass
    else:
        with anyio.fail_after(PATIENCE):
            await anyio.wait_readable(process)
        os.close(process)
    assert names_in(tmp_path) == []


async def test_output_can_be_stored():
    """Whatever a command prints, its output is JSON that can be written as UTF-8."""
    output = await use(shell('head -c 4000 /dev/urandom; printf \'\\n{"a": "\\\\ud800"}\''))
    json.dumps(output, ensure_ascii=False).encode()
