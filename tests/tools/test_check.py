"""What is said about the tools of a plan before it runs."""

import re
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replanning.errors import PlanError, Problem
from replanning.plan.commands import danger_reason, option_problems
from replanning.plan.document import Plan
from replanning.plan.tasks import ToolSpec
from replanning.plan.types import JsonObject, JsonValue
from replanning.tools import check_machine, check_tools
from replanning.tools.check import check_danger, check_unused_arguments


def plan(*tools: JsonObject, tasks: list[JsonObject] | None = None) -> Plan:
    """A plan with these tools, and a task for each unless it says otherwise."""
    tasks = (
        [{"id": tool["name"], "tool": tool["name"]} for tool in tools] if tasks is None else tasks
    )
    return Plan.model_validate(
        {"goal": {"objective": "test"}, "context": {"x": 1}, "tools": list(tools), "tasks": tasks}
    )


def test_nothing_is_wrong():
    """A plan whose tools can be run has no problems."""
    tools: list[JsonObject] = [
        {"name": "a", "kind": "shell", "command": "echo {x}"},
        {"name": "b", "kind": "http", "url": "http://localhost/{x}"},
        {"name": "c", "kind": "python", "callable": "json:dumps"},
        {"name": "d", "kind": "mine"},
    ]
    tasks: list[JsonObject] = [
        {"id": tool["name"], "tool": tool["name"], "arguments": {"x": "${context.x}"}}
        for tool in tools
    ]
    assert check_tools(plan(*tools, tasks=tasks), kinds=frozenset({"mine"})) == []


def test_a_fallback_that_cannot_be_checked_as_its_task_is():
    """A fallback is held to the checks of its task: one that lacks an argument for them is named, one with its own is not."""
    tool: JsonObject = {"name": "a", "kind": "shell", "command": "echo"}
    fallbacks: list[JsonObject] = [
        {"tool": "a", "arguments": {"y": 1}},
        {"tool": "a", "acceptance": ["a file"], "fallbacks": [{"tool": "a"}]},
        {"tool": "a", "arguments": {"x": 2}},
    ]
    task: JsonObject = {"id": "t", "tool": "a", "arguments": {"x": 1}, "acceptance": ["$ ls {x}"]}
    problems = check_tools(plan(tool, tasks=[{**task, "fallbacks": fallbacks}]))
    why = "task 't': the check '$ ls {x}': it needs the arguments ['x'], given are ['y']"
    assert problems == [Problem("tasks[0].fallbacks[0]", why)]


def test_arguments_without_effect():
    """An argument that a command or a request has no place for is noted, unless a check or a tool that may stand in has."""
    tools: list[JsonObject] = [
        {"name": "a", "kind": "shell", "capability": "c", "command": "echo {x}"},
        {
            "name": "b",
            "kind": "http",
            "capability": "c",
            "method": "POST",
            "url": "http://h/",
            "body": {"k": "{y}"},
        },
        {"name": "w", "kind": "shell", "command": "make", "produces": ["wheel"]},
        {"name": "p", "kind": "python", "callable": "json:dumps"},
    ]
    given: JsonObject = {"x": 1, "y": 2, "checked": 3, "modes": 4}
    tasks: list[JsonObject] = [
        {"id": "t", "tool": "a", "arguments": given, "acceptance": ["$ ls {checked}"]},
        {"id": "w", "tool": "w", "arguments": given},
        {"id": "p", "tool": "p", "arguments": given},
        {"id": "f", "tool": "p", "fallbacks": [{"tool": "b", "arguments": {"z": 1, "y": 1}}]},
    ]
    assert check_unused_arguments(plan(*tools, tasks=tasks)) == [
        Problem("tasks[0].arguments.modes", "task 't': tool 'a' makes no use of 'modes'"),
        Problem("tasks[3].fallbacks[0].arguments.z", "task 'f': tool 'b' makes no use of 'z'"),
    ]


def test_everything_is_wrong():
    """Every problem is listed with its place, in the order of the plan."""
    tools: list[JsonObject] = [
        {"name": "a", "kind": "shell", "command": "echo '{x}'"},
        {"name": "b", "kind": "shell", "command": "echo", "produces": ["stdout"]},
        {"name": "c", "kind": "http", "url": "ftp://x"},
        {"name": "d", "kind": "python", "callable": "json:du-mps"},
        {"name": "e", "kind": "shel"},
        {"name": "f"},
        {"name": "unused"},
    ]
    known = "known are ['http', 'mcp', 'python', 'shell']"
    tasks: list[JsonObject] = [
        {"id": tool["name"], "tool": tool["name"], "arguments": {"x": 1}} for tool in tools[:-1]
    ]
    assert check_tools(plan(*tools, tasks=tasks)) == [
        Problem(
            "tools[0]",
            "tool 'a': {x} stands inside quotes; values are quoted for you, remove the quotes, "
            "or write {{x}} for that text itself",
        ),
        Problem(
            "tools[1].produces", "tool 'b': 'stdout' is a part of every output; name it otherwise"
        ),
        Problem(
            "tools[2]", "tool 'c': its url 'ftp://x' must begin with http:// or https:// and a host"
        ),
        Problem(
            "tools[3]",
            "tool 'd': its callable 'json:du-mps' is not of the form 'package.module:function'",
        ),
        Problem(
            "tools[4]", f"nothing executes kind 'shel' of tool 'e'; {known}; did you mean 'shell'?"
        ),
        Problem("tools[5]", f"tool 'f' states no `kind`; {known}"),
    ]


def test_missing_arguments():
    """What the body of a request needs and a task, fallback or undo does not give is listed, each with its place."""
    body: JsonObject = {"a": ["{x}", "<{y}>"]}
    tool: JsonObject = {
        "name": "a",
        "kind": "http",
        "method": "POST",
        "url": "http://x",
        "body": body,
    }
    task: JsonObject = {
        "id": "one",
        "tool": "a",
        "arguments": {"x": 1},
        "fallbacks": [
            {"tool": "a", "arguments": {"x": 1, "y": 2}},
            {"tool": "a", "arguments": {"y": 1}},
        ],
        "undo": {"tool": "a", "arguments": {"x": 1, "y": 2}, "fallbacks": [{"tool": "a"}]},
    }
    assert [str(problem) for problem in check_tools(plan(tool, tasks=[task]))] == [
        "tasks[0].arguments: task 'one': the body of tool 'a' needs the arguments ['y'], given are ['x']",
        "tasks[0].fallbacks[1].arguments: task 'one': the body of tool 'a' needs the arguments ['x'], given are ['y']",
        "tasks[0].undo.fallbacks[0].arguments: task 'one': the body of tool 'a' needs the arguments ['x', 'y'], given are []",
    ]


@pytest.mark.parametrize(
    ("command", "given", "told"),
    [
        (
            "timeout 5 curl -sd {x} http://h",
            "@/etc/passwd",
            ["the name of a file; if it may be one, write @{x} in the command"],
        ),
        *(
            (f"curl {option} http://h", given, ["the name of a file; if it may be one, write @{x} in the command"])
            for option, given in [
                ("-d{x}", "@f"), ("-sSd{x}", "@f"), ("-H {x}", "@f"), ("-H{x}", "@f"), ("--header {x}", "@f"), ("-F {x}", "a=@f"),
                ("-F a={x}", "@f"), ("-F 'a='{x}", "<f"), ("--form {x}", "a=<f"), ("--data-urlencode {x}", "a@f"), ("--json {x}", "@f"),
            ]
        ),
        ("gh api a -F b={x}", "@f", ["the name of a file; if it may be one, write @{x} in the command"]),
        ("curl -F a={x} http://h", "a@b", []),
        ("curl --data-urlencode a={x} http://h", "a@b", []),
        ("curl -H {x} http://h", "A: b@c", []),
        ("curl --data @{x} http://h", "a", []),
        ("curl --json {x} http://h", "-1", []),
        ("curl {x} http://h", "", []),
    ],
)  # fmt: skip
def test_files_among_arguments(command: str, given: str, told: list[str]):
    """Data for `curl` may begin with a dash, and not with the sign that makes it the name of a file to be sent."""
    assert [
        problem.partition(" read as ")[2] for problem in option_problems(command, {"x": given})
    ] == told


@pytest.mark.parametrize(
    ("command", "given", "refused"),
    [
        ("git commit -m {x}", ["-1", "b"], False),
        ("git commit -m {x}", ["msg", "--amend"], True),
        ("tar -cf {x} Makefile", ["x.tar", "--checkpoint-action=exec=rm"], True),
        ("curl -d {x} http://h", ["a", "-o", "b"], True),
        ("ls > {x}", ["a", "-R"], True),
        ("cat -- {x}", ["a", "-R"], False),
    ],
)
def test_lists_after_an_option(command: str, given: list[str], refused: bool):
    """Of a list, only the first word is the value of the option before it; the others may not begin with a dash."""
    assert bool(option_problems(command, {"x": given})) == refused


def test_uses_that_look_dangerous():
    """A use of a tool that looks dangerous is noted where the tool does not state whether it is."""
    start: JsonObject = {"kind": "shell", "command": "timeout 5 {x}"}
    tools: list[JsonObject] = [{"name": "a", **start}, {"name": "b", "dangerous": False, **start}]
    tasks: list[JsonObject] = [
        {"id": f"{n}", "tool": n, "arguments": {"x": x}} for n in "ab" for x in ("ls", "rm")
    ]
    tasks = [{**each, "id": f"t{number}"} for number, each in enumerate(tasks)]
    assert check_danger(plan(*tools, tasks=tasks)) == [
        Problem(
            "tasks[1]",
            "task 't1': tool 'a' may do harm: it uses 'rm'; state whether the tool is `dangerous`",
        )
    ]


def test_many_uses_of_a_long_command():
    """When a million characters of commands have been judged, counted for each use, a note says that no more are."""
    tool: JsonObject = {"name": "a", "kind": "shell", "command": f"echo {'a' * 90_000}"}
    [note] = check_danger(
        plan(tool, tasks=[{"id": f"t{number}", "tool": "a"} for number in range(20)])
    )
    assert (
        str(note) == "tasks[11]: from here on, no use is judged: the commands are too long in all"
    )


def test_options_among_arguments():
    """An argument that a command would read as an option is reported before the plan runs; one that is a reference is not."""
    tool: JsonObject = {"name": "a", "kind": "shell", "command": "cat {x}"}
    tasks: list[JsonObject] = [
        {
            "id": "one",
            "tool": "a",
            "arguments": {"x": "${context.x}"},
            "fallbacks": [{"tool": "a", "arguments": {"x": "-n"}}],
        },
        {"id": "two", "tool": "a", "arguments": {"x": "n-"}},
    ]
    [problem] = check_tools(plan(tool, tasks=tasks))
    assert str(problem) == (
        "tasks[0].fallbacks[0].arguments: task 'one': tool 'a': 'x' is '-n', which would be read as an option; "
        "if it may begin with a dash, write -- before {x} in the command, or --option={x}"
    )


def test_what_the_machine_lacks():
    """Programs, modules and variables that are not there are noted."""
    tools: list[JsonObject] = [
        {
            "name": "a",
            "kind": "shell",
            "command": "A=1 no-such-1 --x '|' no-such-0 | no-such-2 2>&1 && if true; then no-such-3; fi; echo $(no-such-4)",
            "env": {"B": "{env:B}"},
        },
        {"name": "b", "kind": "python", "callable": "no_such.module:f"},
        {"name": "c", "kind": "http", "url": "http://x", "headers": {"A": "{env:C}{env:PATH}"}},
        {"name": "d", "kind": "shell", "command": "case x in no) no;; esac; f() { no; }; ls | wc"},
        {"name": "e", "kind": "shell", "command": "{program} x; ls"},
    ]
    assert [
        str(note) for note in check_machine(plan(*tools, tasks=[]), {"PATH": "/bin:/usr/bin"})
    ] == [
        *(
            f"tools[0]: tool 'a' needs the program 'no-such-{n}', which is not on the PATH"
            for n in (1, 2, 3, 4)
        ),
        "tools[0]: tool 'a' needs the environment variables B, which are not set",
        "tools[1]: tool 'b' needs the module 'no_such', which is not found; install it, or put its folder on PYTHONPATH",
        "tools[2]: tool 'c' needs the environment variables C, which are not set",
    ]


# What may do harm by what it is


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("sh -c {x}", "it runs whatever text it is given with 'sh'"),
        ("timeout 5 /usr/bin/python3.11 -ic {x}", "it runs whatever text it is given with 'python3.11'"),
        ("node -e {x} {y}", "it runs whatever text it is given with 'node'"),
        ("eval {x}", "it runs whatever text it is given with 'eval'"),
        ("env A=b {x}", "it runs whatever program it is told to"),
        ("mkdir -p out && rm -rf {x}", "it uses 'rm'"),
        ("while read -r f; do rm $f; done", "it uses 'rm'"),
        ("find . -name {x} -delete", "it uses 'find -delete'"),
        ("find . -name {x} | xargs -r /bin/rm", "it uses 'rm'"),
        ("timeout 5 sudo ls", "it acts as somebody else, with 'sudo'"),
        ("sudo ls", "it acts as somebody else, with 'sudo'"),
        ("ssh host {x}", "it runs whatever text it is given with 'ssh'"),
        ("ssh -p 22 -o BatchMode=yes {user} ls {x}", "it runs whatever text it is given with 'ssh'"),
        ("timeout 5 ssh host {x}", "it runs whatever text it is given with 'ssh'"),
        ("ssh host 'cd x; rm y'", "it uses 'rm'"),
        ("git -C repo push --force origin main", "it discards work, with 'git push --force'"),
        ("git push origin +main", "it discards work, with 'git push +main'"),
        ("git fetch && git reset '--hard' origin/main", "it discards work, with 'git reset --hard'"),
        ("timeout 9 git clean -xdf", "it discards work, with 'git clean -xdf'"),
        ("git branch -D old", "it discards work, with 'git branch -D'"),
        ("psql -c 'select 1' shop", "it works on a database, with 'psql'"),
        ("cat x.sql | /usr/bin/mysql shop", "it works on a database, with 'mysql'"),
        ("chmod -R 777 .", "it changes permissions recursively, with 'chmod'"),
        ("find . | xargs chown --recursive me", "it changes permissions recursively, with 'chown'"),
        ("ssh host sudo reboot", "it acts as somebody else, with 'sudo'"),
        ("git -c {x} log", "it runs whatever text it is given with 'git'"),
        ("git -c core.pager={x} log", "it runs whatever text it is given with 'git'"),
        ("timeout 5 ssh -oProxyCommand={x} host", "it runs whatever text it is given with 'ssh'"),
        ("rsync -ae {x} a b", "it runs whatever text it is given with 'rsync'"),
        ("tar --checkpoint-action={x} -cf a b", "it runs whatever text it is given with 'tar'"),
        ("awk -F, {x} file", "it runs whatever text it is given with 'awk'"),
        ("env -S {x}", "it runs whatever text it is given with 'env'"),
        ("cd x; GIT_SSH_COMMAND={x} git pull", "it runs whatever 'GIT_SSH_COMMAND' is set to"),
        *(
            (command, "it uses 'rm'")
            for command in (
                "uv run --with a rm b", "uv run -p 3.12 -- rm b", "uvx --from a rm b", "npx -p a rm b", "npx -p a -c 'rm b'",
                "npm exec --package=a -- rm b", "pnpm dlx rm b", "pipx run --spec a rm b", "poetry -C d run rm b",
                "hatch -e test run rm b", "conda run -n e rm b", "nix shell nixpkgs#a -c rm b", "nix run a -- rm b",
                "mise x python@3 -- rm b", "op run -- rm b", "tmux new -d 'rm b'",
                "echo ${a:-$(rm b)}", "echo ${a:-`rm b`}", "echo $(( $(rm b) ))", "cat <<END\n$(rm b)\nEND\n", "coproc rm b",
                "case a in a) rm b;; esac", "trap 'rm b' EXIT", "eval 'rm b'", "eval rm b",
                'echo "rm b" | sh', "printf 'rm %s' b | /bin/bash -s", "echo rm b | tee c | sh", "cat <<END | sh\nrm b\nEND\n",
                "alias ls='rm b'", "alias a=b ls=\"rm b\"", "sh -c \"echo 'rm b' | sh\"",
            )
        ),
        *(
            (command, "it runs whatever program it is told to")
            for command in ("$A b", '"$A" b', "${A:-rm} b", "a && bin/$A b", "timeout 5 $A", "ls | xargs $A", '"$@"', '"`a`" b',
                            "find . -exec $A {} ;", 'find . -name b -execdir "$A" {} +', "find . -ok ${A} {} ;")
        ),
    ],
)  # fmt: skip
def test_commands_that_may_do_harm(command, why):
    """A command that runs what it is given, deletes, or acts as somebody else is dangerous, also on another machine."""
    assert danger_reason(ToolSpec(name="t", kind="shell", command=command)) == why


@pytest.mark.parametrize(
    ("command", "arguments", "why"),
    [
        ("timeout 5 {x} y", {"x": "/bin/rm"}, "it uses 'rm'"),
        ("find . {x}", {"x": ["-name", "a b", "-delete"]}, "it uses 'find -delete'"),
        ("git push origin {x}", {"x": ":gone"}, "it discards work, with 'git push :gone'"),
        ("xargs {x}", {"x": "sudo"}, "it acts as somebody else, with 'sudo'"),
        ("find . -exec {x} ';'", {"x": "rm"}, "it uses 'rm'"),
        ("xargs {x}", {"x": ["sh", "-c", "rm a"]}, "it runs whatever text it is given with 'sh'"),
        ("make {x}", {"x": "SHELL=./x"}, "it runs whatever text it is given with 'make'"),
        ("make A={x}", {"x": "$(shell x)"}, "it runs whatever text it is given with 'make'"),
        (
            "git {x}",
            {"x": ["-c", "alias.a=!x", "a"]},
            "it runs whatever text it is given with 'git'",
        ),
        (
            "git config {x} {y}",
            {"x": "core.hooksPath", "y": "x"},
            "it runs whatever text it is given with 'git'",
        ),
        (
            "docker exec box {x}",
            {"x": ["python", "-c", "x"]},
            "it runs whatever text it is given with 'python'",
        ),
        ("sed -n {n}p f", {"n": "1e x;"}, "it runs whatever text it is given with 'sed'"),
        ("make {x}", {"x": "test"}, ""),
        ("git config {x} {y}", {"x": "user.name", "y": "x"}, ""),
        ("timeout 9 git commit -m {x}", {"x": "rm the old $(file) and `su`"}, ""),
        ("env -i {x}", {"x": "rm"}, "it uses 'rm'"),
        ("nice -n 5 {x}", {"x": "rm"}, "it uses 'rm'"),
        ("cat {x}", {"x": "a\nrm b"}, ""),
        ("echo {x}", {"x": "rm"}, ""),
        ("cat {x} {y}", {"x": "a; rm b $(sudo c) {y} \0"}, ""),
    ],
)
def test_filled_commands_that_may_do_harm(command, arguments, why):
    """A command is judged with its arguments as well, each of which is a word and no more."""
    tool = ToolSpec(
        name="t",
        kind="shell",
        command=command,
        parameters={"n": "integer"} if "{n}" in command else {},
    )
    assert (danger_reason(tool), danger_reason(tool, arguments)) == ("", why)


HARMFUL: Final = {
    "it runs whatever text it is given with": r"""
        sed -n {x} f  sed -e {x} f  sed -n -i.bak {x}p f  sed -e s/a/b/ -e s/b/{x}/ f  sed --expression={x} f  gsed {x} f
        awk -v n=1 {x}  awk -F, -v a=b {x} f  mawk -e {x}  make --eval {x}  python3 -W ignore -c {x}  sh -c{x}  perl -ne {x} f
        deno eval {x}  php -r {x}  vim -c {x} f  git config alias.x {x}  git config --global core.pager {x}  git bisect run {x}
        git submodule foreach --recursive {x}  git rebase main -x {x}  git rebase --exec {x}  git -C a -c core.editor={x} log
        git --exec-path={x} log  git fetch --upload-pack {x} a  watch -n 5 {x}  watch ls {x}  parallel -j 4 {x} ::: a
        flock f -c {x}  script -qc {x} log  zip a.zip f -T -TT {x}  tar xf a --to-command={x}  scp -S {x} a b:c
        rsync --rsh={x} a b  ssh -o ProxyCommand={x} h  docker exec box sh -c {x}  kubectl exec p -- bash -c {x}
        uv run python -c {x}  taskset 1 sh -c {x}  flock f sh -c {x}  env -i node -e {x}  nsenter -t 1 sh -c {x}""",
    "it runs whatever package it is given with": """
        pip install {x}  python3 -m pip install -U {x}  uv pip install {x}  uv add {x}  npm install {x}  npx {x}  npx -y {x}
        npm exec {x}  pipx run {x}  cargo install {x}  go install {x}  brew install {x}  uvx {x}  npx -p {x} a
        docker run --rm -v a:/a {x}  uv tool install {x}""",
    "it runs whatever program it is told to": "{x} a  env A=b {x}  exec {x}",
    "it runs whatever": """
        PAGER={x} git log  GIT_SSH={x} git pull  GIT_EXTERNAL_DIFF={x} git diff  NODE_OPTIONS={x} node a.js  PYTHONSTARTUP={x} python
        PERL5OPT={x} perl a  RUBYOPT={x} ruby a  LD_PRELOAD={x} ls  MAKEFLAGS={x} make  export BASH_ENV={x}  EDITOR={x} crontab -l""",
    "it acts as somebody else, with": "pkexec ls  runuser -u me ls  nice sudo ls  \\sudo ls",
    "it discards work, with": """
        git checkout {x}  git checkout -- f  git checkout .  git -C a checkout main -- f  git restore {x}  git restore -W -S f
        git rm {x}  git switch -f a  git stash drop  git tag -d v1  git reflog expire --all  git filter-branch a  git reset --merge
        docker exec box git reset --hard  watch 'git clean -f'  git submodule foreach 'git reset --hard'  flock f -c 'git clean -f'""",
    "it works on a database, with": "docker exec db psql -c x  redis-cli FLUSHALL  mongo --eval x  kubectl exec p -- mysql",
    "it uses": r"""
        \rm a  'r'm a  "rm" a  r""m a  $(which rm) a  $(command -v rm) a  busybox rm a  flock f rm a  docker exec box rm -rf /a
        docker run -it img rm a  podman exec box dd  kubectl exec p -- rm a  uv run rm a  python3 -m x; rm a  systemd-run rm a
        ssh -tt h 'rm a'  strace -o f rm a  script -c 'rm a' f  parallel rm ::: a  find . -exec sh -c 'rm a' ';'  echo "$(rm a)"  echo `rm a`
        a=`rm b`; ls  unshare rm a  chrt 1 rm a  gdb --args rm a  git bisect run rm a  truncate -s0 f  mkfs.ext4 a
        terraform destroy  terraform -chdir=a apply  kubectl delete pod a  kubectl -n a delete pod b  helm uninstall a
        aws s3 rm s3://a  aws ec2 terminate-instances  gcloud compute instances delete a  gh repo delete a  systemctl stop a
        crontab -r  crontab f  shred a  iptables -F  docker system prune  docker rm -f a  docker volume rm a  docker compose down -v
        rsync -a --delete a b  tar cf a --remove-files b  apt-get -y remove a  shutdown now  npm unpublish a  pkill a""",
}
"""Commands, separated by two blanks, by the beginning of the reason for which they count as dangerous."""


@pytest.mark.parametrize(
    ("command", "why"),
    [(one, why) for why, text in HARMFUL.items() for one in re.split(r"\s{2,}", text.strip())],
)
def test_further_commands_that_may_do_harm(command, why):
    """Widely used programs that run what they are given, start others, or destroy something are dangerous."""
    assert danger_reason(ToolSpec(name="t", kind="shell", command=command)).startswith(why)


ORDINARY: Final = r"""
    pytest  pytest -q {x}  pytest -k {x} tests  python -m pytest -k {x}  python -m pytest -c {x}  python3 main.py {x}  ruff check .
    ruff format {x}  mypy src  git status  git add {x}  git add -A  git commit -m {x}  git commit -am {x}  git log --oneline -5
    git diff {x}  git show {x}  git switch -c {x}  git switch {x}  git checkout -b {x}  git checkout main  git pull --rebase
    git push origin main  git push -u origin {x}  git fetch --all  git clone {x}  git stash  git stash pop  git branch -d {x}
    git tag v1  git rm --cached {x}  git restore --staged {x}  git reset {x}  git rebase main  git cherry-pick -x {x}  git merge {x}
    git config user.name {x}  git commit -c {x}  git submodule update --init  git bisect good  git worktree add {x}  git blame {x}
    ls -la {x}  cat {x}  head -n {x} f  tail -f {x}  wc -l {x}  grep -rn {x} .  rg {x}  find . -name {x}  find . -type f -newer {x}
    sed -n 5p {x}  sed -i s/a/b/ {x}  sed -e s/a/b/ -n {x}  awk '{{print $1}}' {x}  awk -v n={x} '{{print n}}' f  sort {x}  uniq  cut -f1 {x}
    tr a b  jq .a {x}  diff {x} {y}  cp {x} {y}  mv {x} {y}  mkdir -p {x}  touch {x}  echo {x}  printf %s {x}  tee {x}  date  env  pwd  du -sh {x}
    make  make test  make {x}  make -C {x} all  make PREFIX={x} install  cmake --build {x}  npm test  npm run {x}  npm ci  npm install  npx eslint {x}
    npx tsc --noEmit  yarn build  pnpm install  pip install -r requirements.txt  pip install -e .  pip list  python -m build  uv sync
    uv run pytest {x}  uv run python a.py {x}  uv run --with x pytest -k {x}  npx -p typescript tsc {x}  docker run --rm alpine ls {x}
    "$HOME/bin/tool" {x}  n=$(($n + 1))  files=("$@")  [[ $a == b || $c == d ]]  echo "$((n * 2)) ${x:-none}"  cat <<< "$x"
    poetry run pytest -k {x}  cargo build  cargo test {x}  go build ./...  go test {x}  go run {x}
    node a.js {x}  ruby a.rb {x}  perl a.pl {x}  bash a.sh {x}  sh a.sh -c {x}  java -jar a.jar {x}  mvn -q test  gradle build  tsc
    curl -fsS {x}  curl -o {x} http://h  curl -d {x} http://h  wget {x}  tar xf {x}  tar -czf {x} src  zip -r a.zip {x}  unzip {x}  gzip {x}
    rsync -av {x} {y}  scp {x} h:f  ssh h uptime  ssh -i {x} h uptime  docker ps  docker build -t {x} .  docker run --rm img {x}
    docker run --rm -v {x}:/a img ls  docker exec box ls {x}  docker compose up -d  docker compose down  docker logs {x}  kubectl get pods
    kubectl apply -f {x}  kubectl logs {x}  kubectl exec p -- ls {x}  helm install a b  terraform plan  terraform fmt  aws s3 ls {x}
    aws s3 cp {x} s3://a  gcloud compute instances list  gh pr list  gh issue view {x}  systemctl status {x}  crontab -l  ffmpeg -i {x} a.mp4
    timeout 60 pytest {x}  nice -n 5 make  xargs wc -l  xargs -0 grep {x}  watch -n {x} date  flock f make  time ls  nohup python a.py
    which psql  command -v psql  pandoc {x} -o {y}  black {x}  eslint {x}  shellcheck {x}  pre-commit run  tox -e {x}  apt list  brew list
    iptables -L  strace -c ls  PYTHONPATH=src pytest  A={x} make  if test -f {x}; then cat {x}; fi  cd {x} && ls  ls | head  ls > {x}
    echo "$(date) {{x}}"  systemctl is-active {x}  psqlx  dig {x}  ping -c {x} h  openssl dgst {x}  sha256sum {x}  parallel gzip ::: {x}"""
"""Ordinary commands, separated by two blanks."""


def test_here_documents():
    """A here-document is judged if a shell reads it, and so is what follows it."""
    commands = [
        "sh <<EOF\nrm a\nEOF",
        "ssh h <<'EOF'\nrm a\nEOF",
        "cat <<-A\nb\n\tA\nrm a",
        "cat <<< a; rm a",
        "cat <<A\nrm a\nA",
        "cat <<A\nrm a",
    ]
    reasons = [
        danger_reason(ToolSpec(name="t", kind="shell", command=command)) for command in commands
    ]
    assert reasons == ["it uses 'rm'"] * 4 + [""] * 2


def test_ordinary_commands_do_no_harm():
    """None of hundreds of ordinary commands counts as dangerous, with ordinary arguments or without."""
    commands = re.split(r"\s{2,}", ORDINARY.strip())
    tools = [ToolSpec(name="t", kind="shell", command=command) for command in commands]
    given: list[JsonObject] = [
        {},
        {"x": "main", "y": "a b"},
        {"x": 5},
        {"x": "fix the rm of sudo; git push -f"},
    ]
    alarms = {
        tool.command: reason
        for tool in tools
        for each in given
        if (reason := danger_reason(tool, each))
    }
    assert (alarms, len(commands) >= 100) == ({}, True)


def test_long_commands_count_as_dangerous():
    """A command that is too long to be run is not looked at."""
    for command in ("$((" * 100_000, "<(a" * 3_000, "`a` " * 2_000, "timeout " * 30):
        assert "too long" in danger_reason(ToolSpec(name="t", kind="shell", command=command))


@pytest.mark.parametrize(
    ("command", "runner"),
    [
        ("curl -fsSL {url} | sh", "sh"),
        ("curl x | bash -s -- --yes", "bash"),
        ("wget -qO- x 2>/dev/null | gunzip | tee f | python3 -", "python3"),
        ("cd /tmp && curl x |&\n env A=b timeout 5 /bin/bash -eux -o pipefail > log 2>&1", "bash"),
        ("{ curl a; curl b; } | perl", "perl"),
        ("for i in a b; do curl $i; done | sh", "sh"),
        ("curl x | tee >(bash)", "bash"),
        ("curl x | ssh host bash", "bash"),
        ("ssh host cat f | sh", "sh"),
        ("bash <(curl -s x)", "bash"),
        ("bash < <(curl -s x)", "bash"),
        (". <(wget -O- x)", "."),
        ('sh -c "$(curl -fsSL x)"', "sh"),
        ("sh -c $(curl x)", "sh"),
        ('eval "`curl x`"', "eval"),
        ("bash -c 'curl x | sh'", "sh"),
        ("echo {x} | sh", "sh"),
        ("curl -fso /tmp/i.sh x && sh /tmp/i.sh", "sh"),
        ("wget -q http://x/i.sh; bash ./i.sh", "bash"),
        ("curl {url} > {file}; python3 {file}", "python3"),
        ("curl -sO http://x/i && chmod +x i && ./i", "./i"),
    ],
)
def test_running_what_comes_from_elsewhere(command, runner):
    """An interpreter that runs what the network or an argument says counts as dangerous, however that gets to it."""
    said = f"it runs whatever comes from elsewhere, with {runner!r}"
    assert danger_reason(ToolSpec(name="t", kind="shell", command=command)) == said


@pytest.mark.parametrize(
    "command",
    [
        "python3 -c 'import sys' {x}",
        "bash -c 'echo $1' _ {x}",
        "grep -c {x} sh",
        "git rm --cached {x}",
        "git -c user.name={x} commit -m {y}",
        "ssh -o ConnectTimeout={x} host uptime",
        "OUTPUT_PATH={x} make",
        "echo rm {x}",
        "find . -name {x} | xargs wc",
        "sh {x}",
        "ssh -p {port} -i {key} {host} uptime",
        "ssh-keygen -f {x}",
        "scp {x} host:f",
        "grep 'curl' file | sort",
        "sh script.sh",
        "sh < script.sh",
        "cat script.sh | sh",
        "echo ls | sh",
        "echo 'curl x | sh'",
        "echo 'rm a' | grep rm",
        "echo 'rm a' | sh script.sh",
        "echo 'rm a'; cat a | sh",
        "alias ll='ls -l'",
        "find $A -name $B -exec wc {} ;",
        "curl {url} | sort",
        "curl {url} | grep sh",
        "curl {url} | python3 -m json.tool",
        "curl {url} | python3 -W ignore parse.py",
        "curl {url} | python3 -c 'import sys'",
        "curl {url} | perl -pe 's/a/b/'",
        "curl {url} | sh script.sh -s",
        "curl {url} | sh < script.sh",
        "curl {url} || sh script.sh",
        "curl {url} > page; sh script.sh",
        "sh script.sh; curl -F f=@script.sh http://x/git; git push",
        "curl http://x/; sh",
        "curl {url} > $(mktemp); sh $(ls -t)",
        "if curl {url}; then sh script.sh; fi",
        'bash script.sh "$(curl x)"',
        "bash script.sh $(curl {url})",
        "python3 parse.py <(curl {url})",
        "diff <(curl {url}) <(curl {other})",
        "while read -r line; do echo $line; done < <(curl {url})",
        'eval "$(ssh-agent)"',
        'sh -c "$(cat script.sh)"',
        "echo {x} | python3 count.py",
        "echo {x} | wc -c",
    ],
)
def test_no_alarm(command):
    """Fetching, piping, asking another machine, running files of one's own and words that only stand there are harmless."""
    assert danger_reason(ToolSpec(name="t", kind="shell", command=command)) == ""


PARTS = """curl sh bash -c -s ssh x {x} | || & ; < <( >( $( ) " ' ` eval . -o 2> { } done"""


@given(st.lists(st.sampled_from([*PARTS.split(), "\n"])))
def test_whatever_stands_there(parts):
    """No command, however odd, is more than can be looked at."""
    assert isinstance(
        danger_reason(ToolSpec(name="t", kind="shell", command=" ".join(["x", *parts]))), str
    )


def test_requests_that_may_do_harm():
    """A request that deletes counts as dangerous; one that reads does not."""
    tools = [
        ToolSpec(name="t", kind="http", method=method, url="http://x")
        for method in ("GET", "DELETE")
    ]
    assert [danger_reason(tool) for tool in tools] == ["", "it sends DELETE"]


def test_workspaces_that_are_not_confined():
    """A command is said to be unconfined where bubblewrap is missing; an argument of type path is one path, or a list."""
    tool: JsonObject = {
        "name": "t",
        "kind": "shell",
        "command": "cat {x}",
        "parameters": {"x": "path"},
        "workspace": ".",
    }
    tasks: list[JsonValue] = [
        {"id": f"t{n}", "tool": "t", "arguments": {"x": x}} for n, x in enumerate(["a", ["a", "b"]])
    ]
    document = {"goal": {"objective": "g"}, "tools": [tool], "tasks": tasks}
    (note,) = [
        one
        for one in check_machine(Plan.model_validate(document), {"PATH": ""})
        if "workspace" in one.message
    ]
    assert note.place == "tools[0]"
    assert (
        "'t' is not confined to its workspace: 'bwrap' (bubblewrap) is not on the PATH"
        in note.message
    )
    two: JsonValue = [tool, {**tool, "name": "u"}]
    noted = [
        one.message
        for one in check_machine(Plan.model_validate({**document, "tools": two}), {"PATH": ""})
    ]
    assert ["'t', 'u' are not confined to their workspace" in text for text in noted].count(
        True
    ) == 1
    with pytest.raises(PlanError, match="expected path, not a number"):
        Plan.model_validate(
            {**document, "tasks": [{"id": "a", "tool": "t", "arguments": {"x": 3}}]}
        )
