"""Builds the documentation site: collects the pages, generates the reference, and runs the site generator.

`python scripts/build_docs.py` writes `build/site`; `--pages` stops after `build/docs`, which has every page as Markdown, and
`--reference` only rewrites the generated pages of `docs/`. The site generator treats warnings as errors, and nothing is read from
the network.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, get_args

import architecture_diagrams
import state_diagrams
import yaml

from replanning.cli.app import COMMANDS, app
from replanning.journal import Record
from replanning.journal.records import BODY_TYPES, JOURNAL_FORMAT, trigger_types
from replanning.plan.document import plan_schema
from replanning.telemetry import names

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = ROOT / "docs"
PAGES: Final = ROOT / "build" / "docs"

PAGES_OF_THE_ROOT: Final = {
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security-policy.md",
    "NOTICE": "project/notice.md",
    "LICENSE": "project/licence.md",
}
"""Files outside `docs/` that are pages of the site, by their path in the repository."""

CODE_WIDTH: Final = 88
"""Maximum columns of code, also in the tests of the pages and in the stylesheet."""

LINK: Final = re.compile(r"(\]\(|<img [^>]*src=\")(?![a-z]+:|#)([^)#\s\"]+)(#[^)\s]*)?")
ROW: Final = re.compile(r"^\|.*$", re.MULTILINE)
CODE: Final = re.compile(r"`[^`]+`")
LONG_CODE: Final = 26
FENCE: Final = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.MULTILINE | re.DOTALL)

API: Final = {
    "Most programs": {
        "replanning": "The names that most programs need",
        "replanning.plan": "The plan document",
        "replanning.changes": "Changes of a plan",
        "replanning.settings": "Settings",
        "replanning.config": "Reading settings",
        "replanning.errors": "Errors",
    },
    "Runs": {
        "replanning.run": "Runs",
        "replanning.live": "The plan while it runs",
        "replanning.triggers": "Triggers",
        "replanning.journal": "Records and stores",
        "replanning.history": "Reading a journal",
        "replanning.expectations": "Expectations from past calls",
    },
    "Extensions": {
        "replanning.decision": "What plugins implement",
        "replanning.engine": "The engine",
        "replanning.orchestrators": "Orchestrators",
        "replanning.judging": "Judges of finished work",
        "replanning.tools": "Tools of plan files",
        "replanning.telemetry": "Exporters",
        "replanning.llm": "Language models",
        "replanning.planning": "Planning from a goal",
    },
    "Tests": {
        "replanning.testing": "Fakes and simulations",
        "replanning.environment": "Clock, ids and random numbers",
    },
    "Integrations": {},
    "Exporters": {},
}
"""Modules with public names, in the order of the reference. Integrations and exporters are added from their files."""

KIT: Final = ("kit", "session_thread")
"""Public modules for third-party integrations, without separate pages."""


def main(*arguments: str) -> None:
    """Write the pages and the site, or only the part that an option names."""
    if "--reference" in arguments:
        for page, text in reference().items():
            (DOCS / page).write_text(text, encoding="utf-8")
        return

    write_pages()
    if "--pages" not in arguments:
        build_site()


def write_pages() -> None:
    """Write every page of the site as Markdown, with its images."""
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(DOCS, PAGES)
    modules = api_pages()
    for page, text in modules.items():
        write(page, text)
    for source, page in page_sources().items():
        if page not in modules:
            write(page, relinked(read(source), source, page))
    for image in (ROOT / "benchmarks" / "results").glob("*.svg"):
        target = PAGES / "benchmarks" / "results" / image.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(image, target)


def build_site() -> None:
    """Run the site generator on the pages.

    Raises:
        SystemExit: the generator found a problem, or a page would load something from another host.
    """
    (ROOT / "build" / "mkdocs.yml").write_text(
        yaml.safe_dump(site_settings(), sort_keys=False), encoding="utf-8"
    )
    generator = Path(sys.executable).with_name("zensical")
    command = [generator, "build", "--config-file", "build/mkdocs.yml", "--clean", "--strict"]
    if code := subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise SystemExit(code)
    for page in (ROOT / "build" / "site").rglob("*.html"):
        if loaded := re.search(
            r"<(?:script|link|img|iframe)\b(?![^>]*rel=\"?canonical)[^>]*(?:src|href)=\"?https?:[^>]*>",
            page.read_text("utf-8"),
        ):
            raise SystemExit(f"{page} loads something from another host: {loaded[0]}")


def site_settings() -> dict[str, Any]:
    """Return the settings of the generator, with the whole navigation and the metadata of the package."""
    settings: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pages = {str(path.relative_to(PAGES)) for path in PAGES.rglob("*.md")}
    settings["nav"] = filled(settings["nav"], pages)
    for plugin in settings["plugins"]:
        if isinstance(plugin, dict) and "mkdocstrings" in plugin:
            # A relative path would be resolved from two different folders.
            plugin["mkdocstrings"]["custom_templates"] = str(ROOT / "scripts" / "templates")
    settings["site_name"] = f"{project['name']} {project['version']}"
    settings["site_description"] = project["description"]
    settings["copyright"] = f"{project['name']} {project['version']}, {project['license']} licence"
    # A fork, or a copy on another host, has its own addresses.
    urls = project.get("urls", {})
    if source := os.environ.get("SOURCE_URL") or urls.get("Source"):
        settings["repo_url"] = source
    if site := os.environ.get("SITE_URL") or urls.get("Documentation"):
        settings["site_url"] = site
    return settings


def filled(nav: list[Any], pages: set[str]) -> list[Any]:
    """Return the navigation with every folder (`examples/`) replaced by its pages that no other entry names.

    All other unnamed pages are in a last section.
    """
    named = set(re.findall(r"[\w./-]+\.md", str(nav)))
    left = sorted(pages - named)

    def entries(entry: Any) -> list[Any]:
        if isinstance(entry, dict):
            ((title, inner),) = entry.items()
            if isinstance(inner, list):
                return [{title: [each for part in inner for each in entries(part)]}]
            return [entry]
        if entry == "reference/api/":
            left[:] = [page for page in left if not page.startswith(entry)]
            return api_nav()
        if not entry.endswith("/"):
            return [entry]
        here = [page for page in left if page.startswith(entry)]
        left[:] = [page for page in left if page not in here]
        return here

    whole = [each for entry in nav for each in entries(entry)]
    return [*whole, {"More": left}] if left else whole


def page_sources() -> dict[str, str]:
    """Return the pages of the site by their files in the repository."""
    own = {
        f"docs/{path.relative_to(DOCS)}": str(path.relative_to(DOCS))
        for path in sorted(DOCS.rglob("*.md"))
    }
    return (
        own
        | PAGES_OF_THE_ROOT
        | {example: page for example, page in example_pages() if "/" not in page[9:]}
    )


def example_pages() -> Iterator[tuple[str, str]]:
    """Yield each example with a page, and that page."""
    for path in sorted((ROOT / "examples").iterdir()):
        if path.is_dir() or path.suffix in {".py", ".yaml"}:
            yield f"examples/{path.name}", f"examples/{path.name.replace('.', '-')}.md"


def read(source: str) -> str:
    """Return the Markdown of a page; a program, a plan file or a licence becomes a code block."""
    path = ROOT / source
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.suffix in {".py", ".toml"})
        parts = [f"`{each.name}`\n\n{fenced(each)}" for each in files]
        return "\n\n".join([f"# {path.name}", "A package with a plugin.", *parts])
    if path.suffix in {".py", ".yaml"}:
        return f"# {path.name}\n\n{fenced(path)}"
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".md":
        return f"# {path.name.capitalize()}\n\n```text\n{text.rstrip()}\n```\n"
    return text


def fenced(path: Path) -> str:
    """Return a file as a code block."""
    language = {".py": "python", ".toml": "toml", ".yaml": "yaml"}[path.suffix]
    return f"```{language}\n{path.read_text(encoding='utf-8').rstrip()}\n```"


def write(page: str, text: str) -> None:
    """Write a page below `build/docs`."""
    target = PAGES / page
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text.rstrip() + "\n", encoding="utf-8")


def relinked(text: str, source: str, page: str) -> str:
    """Return a page with its links between files of the repository changed to links between pages of the site.

    Raises:
        SystemExit: the target of a link does not exist, or is not a page of the site.
    """
    pages = page_sources()

    def target(link: re.Match[str]) -> str:
        file = os.path.normpath(Path(source).parent / link[2])
        if file.startswith("benchmarks/results/"):
            there = file
        elif file in pages:
            there = pages[file]
        elif file.startswith("docs/") and (ROOT / file).is_file():
            there = file.removeprefix("docs/")  # an image
        else:
            raise SystemExit(
                f"{source}: the link to {link[2]} leads to {file}, which is not a page of the site"
            )
        return f"{link[1]}{os.path.relpath(there, Path(page).parent)}{link[3] or ''}"

    blocks = [match.span() for match in FENCE.finditer(text)]
    edges = [0, *(edge for span in blocks for edge in span), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    return "".join(
        piece if number % 2 else wrapping(LINK.sub(target, piece))
        for number, piece in enumerate(pieces)
    )


def wrapping(text: str) -> str:
    """Return Markdown that lets long code in tables wrap; the stylesheet keeps short code on one line."""

    def marked(code: re.Match[str]) -> str:
        if " " in code[0] and len(code[0]) > LONG_CODE:
            return f"{code[0]}{{.wrap}}"
        return code[0]

    return ROW.sub(lambda row: CODE.sub(marked, row[0]), text)


def reference() -> dict[str, str]:
    """Return the texts of the generated files, by their paths below `docs/`."""
    pages = {
        "reference/plan-file.md": plan_file(),
        "reference/cli.md": command_line(),
        "reference/records.md": records(),
        "reference/telemetry.md": telemetry(),
        "reference/api/index.md": api_index("../../.."),
    }
    written = {page: f"{text.rstrip()}\n" for page, text in pages.items()}
    return written | state_diagrams.diagrams() | architecture_diagrams.diagrams()


# the plan file


def plan_file() -> str:
    """Return the reference of the plan file, from its JSON Schema."""
    schema: dict[str, Any] = plan_schema()
    parts = [(schema.get("title", "Plan"), schema), *sorted(schema.get("$defs", {}).items())]
    text = [
        "# Plan file",
        (
            "A plan file is YAML, or JSON where its name ends in `.json`. `replanning validate plan.yaml` names every problem "
            "with its line and column; `replanning schema` prints the JSON Schema, from which this page is generated. "
            "How to write one: [Plans in files](../how-to/plan-files.md)."
        ),
    ]
    for name, part in parts:
        # A part may have a short form, such as a text, beside the object.
        for form in (part, *part.get("anyOf", ())):
            if form.get("properties"):
                text.append(f"## {name}")
                text.append(sentence(form.get("description", "")))
                text.append(properties(form))
    return "\n\n".join(filter(None, text))


def properties(part: Mapping[str, Any]) -> str:
    """Return the properties of an object as a table."""
    required = set(part.get("required", ()))
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, spec in part["properties"].items():
        default = (
            "required" if name in required else code(spec["default"]) if "default" in spec else ""
        )
        rows.append(
            f"| `{name}` | {type_of(spec)} | {default} | {cell(spec.get('description', ''))} |"
        )
    return "\n".join(rows)


def type_of(spec: Mapping[str, Any]) -> str:
    """Return the type of a part of a JSON Schema, in words."""
    if "$ref" in spec:
        name = spec["$ref"].rsplit("/", 1)[-1]
        return "any" if name == "JsonValue" else f"[{name}](#{name.lower()})"
    if "enum" in spec or "const" in spec:
        return ", ".join(f"`{value}`" for value in spec.get("enum", [spec.get("const")]))
    for union in ("anyOf", "oneOf"):
        if union in spec:
            kinds = [type_of(each) for each in spec[union] if each.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if spec.get("type") == "array":
        return f"list of {type_of(spec['items'])}" if "items" in spec else "list"
    if spec.get("type") == "object":
        inner = spec.get("additionalProperties")
        return f"mapping to {type_of(inner)}" if isinstance(inner, Mapping) and inner else "mapping"
    return str(spec.get("type", "any"))


def code(value: object) -> str:
    """Return a default value as code; empty for None and empty containers."""
    shown = {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
    return "" if value is None or value in ({}, []) else f"`{shown}`"


def cell(text: str) -> str:
    """Return a text for a table cell, with placeholders such as `${…}` as code."""
    return re.sub(r"(\$?\{[^}\s]+\})", r"`\1`", " ".join(text.split()).replace("|", "\\|"))


def sentence(text: str) -> str:
    """Return a text on one line."""
    return " ".join(text.split())


# the command line


def command_line() -> str:
    """Return the reference of the command line, from its commands."""
    import typer

    text = [
        "# Command line",
        "`replanning --help` lists the commands, `replanning COMMAND --help` describes one. Every command takes `--json`.",
        "Exit codes of `run`, `solve` and `resume`:",
        (
            "| code | meaning |\n|---|---|\n"
            "| 0 | the run succeeded |\n"
            "| 1 | the run failed or was aborted |\n"
            "| 2 | wrong usage, plan, settings or store, or another process executes the run; "
            "nothing ran |\n"
            "| 3 | the run is paused and can be resumed |\n"
            "| 4 | the run waits for a person to answer a question |\n"
            "| 130 | the run was stopped at once by a second Ctrl-C; it can be resumed |"
        ),
        "The first Ctrl-C pauses a run: running tasks finish, and the resume command is printed.",
    ]
    for panel, modules in COMMANDS.items():
        text.append(f"## {panel}")
        for name, module in modules.items():
            group: Any = typer.main.get_group(import_module(f"replanning.cli.{module}").commands)
            text += describe(f"replanning {name}", group.commands[name])
    group = typer.main.get_group(app)
    text += describe("replanning version", group.commands["version"])
    return "\n\n".join(text)


def describe(name: str, command: Any) -> Iterator[str]:
    """Yield the description of a command, and of the commands in its group."""
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option"]
    usage = [name, *("[OPTIONS]" if options else "",), *(usage_of(param) for param in arguments)]
    yield f"### {name}"
    if not getattr(command, "commands", None):
        yield f"```text\n{wrapped(' '.join(filter(None, usage)), '')}\n```"
    yield prose(command.help or "")
    rows = [f"| `{usage_of(param)}` | {cell(param.help or '')} |" for param in arguments]
    for param in options:
        flags = ", ".join(f"`{flag}`" for flag in [*param.opts, *param.secondary_opts])
        value = "" if param.is_flag else f" `{param.metavar or choices(param)}`"
        variable = f" Variable `{param.envvar}`." if isinstance(param.envvar, str) else ""
        rows.append(f"| {flags}{value} | {cell(param.help or '')}{variable} |")
    if rows:
        yield "\n".join(["| argument or option | meaning |", "|---|---|", *rows])
    examples = (
        (command.epilog or "")
        .partition("[bold]Examples[/bold]")[2]
        .partition("[bold]")[0]
        .split("\n")
    )
    lines = [line.strip() for line in examples if line.strip().startswith("replanning ")]
    if lines:
        shown = "\n".join(example(line) for line in lines)
        yield f"```console\n{shown}\n```"
    for inner, each in getattr(command, "commands", {}).items():
        yield from describe(f"{name} {inner}", each)


def example(line: str) -> str:
    """Return an example of the help as typed, with its note as a comment after it, or before a long command."""
    command, _, note = line.partition("   ")
    typed = wrapped(f"$ {command}", " \\")
    if not note:
        return typed
    beside = f"{typed}   # {note.strip()}"
    return beside if len(beside) <= CODE_WIDTH else f"$ # {note.strip()}\n{typed}"


def wrapped(command: str, end: str) -> str:
    """Return a command in lines of at most `CODE_WIDTH` columns, with an end on each line but the last."""
    lines = [""]
    for word in re.findall(r"(?:\"[^\"]*\"|'[^']*'|\S)+", command):
        longer = f"{lines[-1]} {word}".lstrip() if len(lines) == 1 else f"{lines[-1]} {word}"
        if len(longer) + len(end) > CODE_WIDTH:
            lines.append(f"    {word}")
        else:
            lines[-1] = longer
    return f"{end}\n".join(lines)


def choices(param: Any) -> str:
    """Return the values of an option, or `VALUE` if any is possible."""
    values = get_args(getattr(param, "type_descriptor", None) and param.type_descriptor.annotation)
    return (
        "|".join(map(str, values))
        if values and all(isinstance(each, str) for each in values)
        else "VALUE"
    )


def usage_of(param: Any) -> str:
    """Return an argument as the usage line shows it."""
    return str(param.metavar or param.name.upper()) + ("..." if param.nargs == -1 else "")


def prose(text: str) -> str:
    """Return help text as Markdown: without terminal markup, and with angle brackets escaped."""
    return re.sub(r"\[/?bold\]", "", text).replace("<", "&lt;")


# the journal


def records() -> str:
    """Return the reference of the journal, from the classes of its records."""
    text = [
        "# Journal records",
        (
            f"A journal is a sequence of numbered records. This is format {JOURNAL_FORMAT}, which the first record of a journal "
            "states; [Versions](../project/versions.md#journals) says which formats a release reads. "
            "A record has these fields:"
        ),
        fields_of(Record),
        "`engine.store.read(run_id)` returns the records of a run. `replanning history RUN --json` prints what follows from them, in a form of its own.",
        "## Bodies",
    ]
    for kind, body in BODY_TYPES.items():
        text += [f"### {kind}", docstring(body), fields_of(body)]
    text += [
        "## Triggers",
        "The trigger in `trigger-fired` has one of these kinds, or the kind of a plugin.",
    ]
    for kind, trigger in sorted(trigger_types().items()):
        # Plugins that are installed here may define further kinds.
        if not trigger.__module__.startswith("replanning."):
            continue
        text += [f"### {kind}", docstring(trigger), fields_of(trigger)]
    return "\n\n".join(filter(None, text))


def docstring(cls: type) -> str:
    """Return the docstring of a class without its sections and examples."""
    import inspect

    return inspect.cleandoc(cls.__doc__ or "").split("\n\nArgs:")[0]


def fields_of(cls: type) -> str:
    """Return the fields of a class as a table of names and types."""
    hints = {
        name: hint
        for each in reversed(cls.__mro__)
        for name, hint in vars(each).get("__annotations__", {}).items()
    }
    own = getattr(cls, "model_fields", None) or getattr(cls, "__dataclass_fields__", None) or hints
    types = {name: str(getattr(hint, "__forward_arg__", hint)) for name, hint in hints.items()}
    rows = [
        f"| `{name}` | `{types.get(name, 'object')}` |"
        for name in own
        if name != "kind" and not types.get(name, "").startswith("ClassVar")
    ]
    return "\n".join(["| field | type |", "|---|---|", *rows]) if rows else ""


# spans and metrics


def telemetry() -> str:
    """Return the names of spans, attributes and metrics, in the groups of the module that defines them."""
    source = Path(names.__file__).read_text(encoding="utf-8")
    body = ast.parse(source).body
    notes = {
        node.target.id: ast.literal_eval(after.value)
        for node, after in pairwise(body)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(after, ast.Expr)
    }
    text = [
        "# Spans and metrics",
        (
            "How to send them: [Traces](../how-to/traces.md). A call of a language model follows the GenAI conventions of "
            "OpenTelemetry. Arguments, outputs, reasons and questions are on spans only with `capture_content: true`."
        ),
    ]
    for comment, lines in re.findall(r"((?:^# .*\n)+)((?:.*\n)*?)(?=^# |\Z)", source, re.MULTILINE):
        title = " ".join(line.removeprefix("# ") for line in comment.splitlines())
        head, _, rest = title.partition(". ")
        text += [f"## {head}", rest]
        found = [
            (getattr(names, name), notes.get(name, ""))
            for name in re.findall(r"^([A-Z_]+): Final", lines, re.MULTILINE)
        ]
        rows = [
            (", ".join((value,) if isinstance(value, str) else value), note)
            for value, note in found
        ]
        text.append(
            "\n".join(
                f"- `{name}`: {note}" if note else f"- `{name}`"
                for name, note in rows
                if head != "Metrics"
            )
        )
    text.append("\n".join(f"- `{name}`: {note}" for name, note in metrics()))
    return "\n\n".join(filter(None, text))


def metrics() -> Iterator[tuple[str, str]]:
    """Yield the metrics with their units and descriptions, as the exporter creates them."""
    source = (ROOT / "replanning" / "telemetry" / "providers.py").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "").startswith("create_"):
            kind = node.func.attr.removeprefix("create_")  # type: ignore[attr-defined]
            name = getattr(names, node.args[0].attr)  # type: ignore[attr-defined]
            texts = [
                each.value
                for each in [*node.args[1:], *(word.value for word in node.keywords)]
                if isinstance(each, ast.Constant)
            ]
            yield (
                name,
                f"{kind}, {texts[0]}: {texts[1]}" if len(texts) > 1 else f"{kind}, {texts[0]}",
            )


# the Python API


def api_modules() -> dict[str, dict[str, str]]:
    """Return the public modules with their titles, by the groups of the reference."""
    groups = {title: dict(modules) for title, modules in API.items()}
    for family in ("integrations", "exporters"):
        for path in sorted((ROOT / "replanning" / family).glob("[!_]*.py")):
            has_page = (DOCS / family / f"{path.stem}.md").exists()
            if family == "integrations" and not has_page and path.stem not in KIT:
                continue  # shared code
            groups[family.capitalize()][f"replanning.{family}.{path.stem}"] = summary(
                module_docstring(f"replanning.{family}.{path.stem}")
            )
    return groups


def api_names() -> dict[str, list[str]]:
    """Return the public names of each module, with every name only at the first module that exports it."""
    names: dict[str, list[str]] = {}
    seen = set[str]()
    for group, modules in api_modules().items():
        for module in modules:
            exported = [name for name in public_names(module) if name not in seen]
            if exported:
                names[module] = exported
            if group not in {"Integrations", "Exporters"}:
                seen |= set(exported)
    return names


def api_page(module: str) -> str:
    """Return the path of a module's page."""
    return f"reference/api/{module.removeprefix('replanning.')}.md"


def api_pages() -> dict[str, str]:
    """Return one page for each public module, and their index."""
    pages = {"reference/api/index.md": api_index("")}
    for module, exported in api_names().items():
        entries = [f"::: {module}.{name}" for name in exported]
        pages[api_page(module)] = "\n\n".join([f"# {module}", *entries])
    return pages


def api_nav() -> list[Any]:
    """Return the navigation of the modules: in their groups, by their short names."""
    exported = api_names()
    groups = []
    for title, modules in api_modules().items():
        entries = [
            {module.rpartition(".")[2]: api_page(module)}
            for module in modules
            if module in exported
        ]
        groups.append({title: entries})
    return groups


def api_index(root: str) -> str:
    """Return the list of all public names, with links to the source or, on the site, to the pages of the modules.

    Args:
        root: the relative path to the root of the repository; empty on the site.
    """
    exported = api_names()
    text = [
        "# Python API",
        "Only these names are public. A plugin or program that uses them keeps working.",
    ]
    for group, modules in api_modules().items():
        text.append(f"## {group}")
        for module, title in modules.items():
            if module not in exported:
                continue
            text.append(f"### {module}")
            about = f"{title.rstrip('.')}."
            if root:
                source = source_of(module).relative_to(ROOT)
                text.append(f"{about} [Source]({root}/{source})")
                rows = [f"| `{name}` | {about_name(module, name)} |" for name in exported[module]]
            else:
                page = Path(api_page(module)).name
                text.append(f"{about} [Signatures and descriptions]({page})")
                rows = [
                    f"| [`{name}`]({page}#{module}.{name}) | {about_name(module, name)} |"
                    for name in exported[module]
                ]
            text.append("\n".join(["| name | about |", "|---|---|", *rows]))
    return "\n\n".join(text)


def source_of(module: str) -> Path:
    """Return the file of a module."""
    base = ROOT / module.replace(".", "/")
    package = base / "__init__.py"
    return package if package.exists() else base.with_suffix(".py")


def module_docstring(module: str) -> str:
    """Return the docstring of a module, from its source."""
    return ast.get_docstring(parsed(module)) or ""


def summary(text: str) -> str:
    """Return the first sentence of a docstring."""
    return sentence(text.partition("\n\n")[0])


@cache
def parsed(module: str) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(source_of(module).read_text(encoding="utf-8"))


def about_name(module: str, name: str) -> str:
    """Return the first sentence about a public name, from the module that defines it."""
    tree = parsed(module)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return about_name(str(node.module), alias.name)
    for node, after in pairwise([*tree.body, ast.Pass()]):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if node.name == name and text:
                return cell(summary(text))
        elif is_assignment_of(node, name) and isinstance(after, ast.Expr):
            return cell(summary(str(ast.literal_eval(after.value))))
    return ""


def is_assignment_of(node: ast.stmt, name: str) -> bool:
    """Return whether a statement assigns to a name."""
    if isinstance(node, ast.AnnAssign):
        return getattr(node.target, "id", "") == name
    if isinstance(node, ast.Assign):
        return getattr(node.targets[0], "id", "") == name
    return False


def public_names(module: str) -> list[str]:
    """Return the public names of a module from its source: importing it may need packages that are not installed."""
    tree = parsed(module).body
    for node in tree:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [
                name
                for name in ast.literal_eval(node.value)
                if name not in {"JsonValue", "__version__"}
            ]
    defined = [
        node.name
        for node in tree
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return [name for name in defined if not name.startswith("_")]


if __name__ == "__main__":
    main(*sys.argv[1:])
